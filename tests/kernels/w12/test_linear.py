"""The layers on a CPU (plain torch underneath), swapping by name, and the choice of launch shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specpilot.kernels.w12 import autotune, gemm, library
from specpilot.kernels.w12.errors import MachineProblem
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.layout import tile_w12
from specpilot.kernels.w12.linear import W12GateUp, W12Head, W12Linear, W12Weight, from_linear, swap

SHAPES = [
    (8192, 5120),
    (5120, 6144),
    (34816, 5120),
    (5120, 17408),
    (248320, 5120),
    (8704, 6656),
    (1024, 1024),
    (50, 64),
]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def test_linear_equals_the_library_on_the_same_weight() -> None:
    dense = nn.Linear(128, 48).bfloat16()
    x, residual = gaussian(3, 5, 128), gaussian(3, 5, 48, seed=1)
    packed = W12Linear.from_dense(dense)
    assert torch.equal(packed(x), dense(x))
    assert torch.equal(packed(x, residual), dense(x) + residual)
    planes = encode(dense.weight.detach())
    assert torch.equal(W12Linear.from_planes(planes)(x), F.linear(x, dense.weight))


def test_gate_up_and_head() -> None:
    gate, up, x = gaussian(32, 64), gaussian(32, 64, seed=1), gaussian(7, 64, seed=2) * 50
    assert torch.equal(W12GateUp(gate, up)(x), F.silu(F.linear(x, gate)) * F.linear(x, up))
    weight = gaussian(100, 64, seed=3)
    weight[60] = weight[20]  # equal logits: the lower token wins
    head, logits = W12Head(from_linear(weight)), F.linear(x, weight)
    assert torch.equal(head.argmax(x), logits.argmax(-1))
    value, index = head.top(x, 5)
    assert torch.equal(value, logits.float().sort(dim=-1, descending=True, stable=True).values[:, :5])
    assert torch.equal(logits.float().gather(1, index), value)


def test_swap_by_name() -> None:
    model = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)), "odd": nn.Linear(40, 8)}
    ).bfloat16()
    x = gaussian(2, 64)
    before = model["mlp"](x)
    assert swap(model, re.compile(r"mlp\.\d|odd").fullmatch) == ["mlp.0", "mlp.1"], "40 columns fill no subtile"
    assert isinstance(model["mlp"][1], W12Linear) and torch.equal(model["mlp"](x), before)
    assert set(W12Weight(tile_w12(encode(gaussian(16, 64)))).state_dict()) == {"data", "overflow"}


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("m", [1, 16, 40])
def test_the_heuristic_fits_and_keeps_one_order(n: int, k: int, m: int) -> None:
    shape = autotune.heuristic(n, k, m, 132)
    assert shape.fits(autotune.W12_SUBTILE, m)
    groups = min(-(-n // 16 // shape.width), 132 // shape.split)
    assert shape.parts == 1 or groups * shape.width * 16 >= n, "parts of the columns need one round"
    for subtile in (1552, 1568, 1664, 2048):
        shapes = [autotune.heuristic(n, k, rows, 132, subtile) for rows in autotune.BUCKETS]
        assert len({s.parts for s in shapes}) == 1, "a row's result must not depend on the row count"
    head = autotune.heuristic(n, k, m, 132, best=True)
    assert head.parts == 1 and head.fits(autotune.W12_SUBTILE, m, best=True)


def test_tuning_keeps_one_order_for_all_row_counts() -> None:
    def measure(shape: gemm.Shape, m: int) -> float:
        return 30.0 + shape.width + (m == 8) * (shape.parts == 4) * -9 + (m > 8) * (shape.parts == 4) * 9

    entry = autotune.tune(8192, 5120, measure, 132)
    assert set(entry) == {"8", "16", "32", "64"}
    assert len({gemm.Shape(**e).parts for e in entry.values()}) == 1


def test_tuned_files_are_consistent() -> None:
    for path in autotune.TUNED.glob("*.json"):
        for name, entry in json.loads(path.read_text())["shapes"].items():
            shapes = {m: gemm.Shape(**e) for m, e in entry.items()}
            assert len({s.parts for s in shapes.values()}) == 1, f"{path.name}: {name}"
            assert all(s.fits(autotune.W12_SUBTILE, int(m)) for m, s in shapes.items()), f"{path.name}: {name}"


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "find_nvcc", lambda: None)
    with pytest.raises(MachineProblem, match="nvcc") as caught:
        library.compile_library("90a", tmp_path)
    assert "CUDA" in caught.value.hint
    with pytest.raises(MachineProblem, match=r"8\.6"):
        library.target_of((8, 6))
