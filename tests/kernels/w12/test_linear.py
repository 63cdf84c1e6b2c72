"""The layers on a CPU (plain torch underneath), swapping by name, and the choice of launch shapes."""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
import re
import shutil
import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from specpilot.kernels.w12 import autotune, gemm, library, linear
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


def test_nan_logits_are_above_all_as_in_torch() -> None:
    weight, x = gaussian(40, 64), gaussian(4, 64, seed=1)
    weight[7, 3] = weight[30, 3] = torch.nan
    weight[9, 5] = torch.inf
    x[1], x[2, 3] = torch.nan, 0.0  # a row of NaN only; 0 * NaN is NaN too
    head, logits = W12Head(from_linear(weight)), F.linear(x, weight)
    assert logits[1].isnan().all() and logits[0].isnan().sum() == 2 and logits.isinf().any()
    assert head.argmax(x).tolist() == logits.argmax(-1).tolist() == [7, 0, 7, 7]
    value, index = head.top(x, 5)
    assert index[0, :2].tolist() == [7, 30] and value[0, :2].isnan().all() and not value[0, 2:].isnan().any()
    assert index[1].tolist() == [0, 1, 2, 3, 4]


ORDER = """
#define __device__
#define __forceinline__ inline
#include "order.cuh"
extern "C" int better(float v, int i, float w, int j) { return w12::better(v, i, w, j); }
"""


def test_the_order_of_the_cuda_kernels_is_torchs(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / "order.cpp").write_text(ORDER)
    words = [compiler, "-O2", "-shared", "-fPIC", f"-I{library.SOURCES}", "-o", "order.so", "order.cpp"]
    subprocess.run(words, cwd=tmp_path, check=True)
    better = ctypes.CDLL(str(tmp_path / "order.so")).better
    better.argtypes = [ctypes.c_float, ctypes.c_int] * 2
    values = [0.0, torch.nan, -torch.inf, 3.0, torch.inf, -0.0, torch.nan, 3.0, -torch.inf, -1.0, torch.inf]
    wanted = torch.tensor(values).sort(descending=True, stable=True).indices.tolist()
    place = {token: rank for rank, token in enumerate(wanted)}
    for i, j in itertools.product(range(len(values)), repeat=2):
        assert bool(better(values[i], i, values[j], j)) == (place[i] < place[j]), (values[i], i, values[j], j)


def test_the_scratch_keeps_what_a_graph_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_scratch", {})
    device = torch.device("cpu")
    small = linear.scratch(device, 100)
    kept = weakref.ref(small)
    assert linear.scratch(device, 50) is small
    del small
    large = linear.scratch(device, 101)
    assert large.numel() == 101 and kept() is not None, "a captured graph still writes there"
    assert linear.scratch(device, 100) is large


def test_the_scratch_does_not_grow_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(linear, "_scratch", {card: [torch.empty(100, dtype=torch.bfloat16)]})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert linear.scratch(card, 100).numel() == 100
    with pytest.raises(RuntimeError, match="before capturing"):
        linear.scratch(card, 101)


def test_a_launch_shape_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shapes of the H200's file; the second time the card is not asked."""
    tuned = json.loads((autotune.TUNED / "NVIDIA_H200.json").read_text())["shapes"]["5120x6144"]
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    autotune._card.cache_clear()
    try:
        found = {m: autotune.choose(5120, 6144, m, torch.device("cuda", 0)) for m in (8, 16, 32, 64)}
        assert found == {m: gemm.Shape(**tuned[str(m)]) for m in found}
        assert autotune.choose(5120, 6144, 3) == found[8], "the card at hand is number 1"
        monkeypatch.delattr(torch.cuda, "get_device_properties")
        monkeypatch.delattr(torch.cuda, "get_device_name")
        for device in (torch.device("cuda", 0), torch.device("cuda"), 1, None):
            assert autotune.choose(5120, 6144, 9, device) is found[16]
    finally:
        autotune._card.cache_clear()


def test_swap_by_name() -> None:
    model = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)), "odd": nn.Linear(40, 8)}
    ).bfloat16()
    x = gaussian(2, 64)
    before = model["mlp"](x)
    assert swap(model, re.compile(r"mlp\.\d|odd").fullmatch) == ["mlp.0", "mlp.1"], "40 columns fill no subtile"
    assert isinstance(model["mlp"][1], W12Linear) and torch.equal(model["mlp"](x), before)
    assert set(W12Weight(tile_w12(encode(gaussian(16, 64)))).state_dict()) == {"data", "overflow"}


@pytest.mark.parametrize("shape", [(128,), (0, 128), (1, 128), (3, 0, 128), (2, 3, 128)])
def test_any_batch_bias_residual_and_out(shape: tuple[int, ...]) -> None:
    dense = nn.Linear(128, 48).bfloat16()
    packed, x, residual = W12Linear.from_dense(dense), gaussian(*shape), gaussian(*shape[:-1], 48, seed=1)
    expected = dense(x) + residual
    out = torch.empty_like(expected)
    assert packed(x, residual, out) is out and torch.equal(out, expected)
    assert packed(x, residual, out=residual) is residual and torch.equal(residual, expected), "in place"


def test_wrong_shapes_are_named() -> None:
    packed, head = W12Linear(from_linear(gaussian(48, 128))), W12Head(from_linear(gaussian(8, 64)))
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 128\]"):
        packed(gaussian(4, 64))  # as many values as two rows
    with pytest.raises(ValueError, match=r"x must be"):
        packed(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"out must be \[2, 48\]"):
        packed(gaussian(2, 128), out=gaussian(4, 48))
    with pytest.raises(ValueError, match=r"residual must be \[2, 48\]"):
        packed(gaussian(2, 128), gaussian(48))  # torch would spread it over the rows
    with pytest.raises(ValueError, match="one shape"):
        W12GateUp(gaussian(16, 64), gaussian(32, 64))
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        W12GateUp(gaussian(12, 64), gaussian(12, 64))
    with pytest.raises(TypeError, match="bfloat16"):
        W12GateUp(torch.zeros(16, 64), torch.zeros(16, 64))
    for x in (gaussian(64), gaussian(2, 3, 64), gaussian(2, 128)):
        with pytest.raises(ValueError, match=r"x must be \[rows, 64\]"):
            head.argmax(x)
        with pytest.raises(ValueError, match=r"x must be \[rows, 64\]"):
            head.top(x, 1)
    for out in (
        torch.empty(2, dtype=torch.int32),
        torch.empty(3, dtype=torch.int64),
        torch.empty(4, dtype=torch.int64)[::2],
    ):
        with pytest.raises(ValueError, match=r"out must be contiguous int64 \[2\]"):
            head.argmax(gaussian(2, 64), out)
    for k, words in ((0, "1..16"), (17, "1..16"), (9, "8 tokens")):
        with pytest.raises(ValueError, match=words):
            head.top(gaussian(2, 64), k)
    assert head.argmax(gaussian(0, 64)).shape == (0,) and head.top(gaussian(0, 64), 2)[1].shape == (0, 2)


def test_a_cast_or_a_copy_of_a_model_leaves_its_layers_whole() -> None:
    weight, x = gaussian(40, 64), gaussian(3, 64)
    model = nn.ModuleDict({"head": W12Head(from_linear(weight)), "up": W12GateUp(weight[:16], weight[16:32])})
    expected = model["head"].logits(x), model["up"](x)
    for changed in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float16), copy.deepcopy(model).double()):
        assert torch.equal(changed["head"].logits(x), expected[0]) and torch.equal(changed["up"](x), expected[1])
    assert not any(t.is_floating_point() for t in model.buffers()), "a cast would shorten it under the kernel"


def test_state_goes_into_layers_of_other_weights() -> None:
    wild = gaussian(48, 64)
    wild.view(-1)[::50] = 1e30  # longer records
    wild.view(-1)[:64] = 1e-30  # and an overflow list
    source, x = W12Linear(from_linear(wild), gaussian(48)), gaussian(2, 64)
    target = W12Linear(from_linear(torch.zeros(48, 64, dtype=torch.bfloat16)), torch.zeros(48).bfloat16())
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(x), source(x)) and torch.equal(target.weight.dense(), wild)
    with pytest.raises(RuntimeError, match="size mismatch"):
        W12Linear(from_linear(gaussian(64, 64)), gaussian(48)).load_state_dict(source.state_dict())


def test_swap_leaves_alone_what_it_must_and_keeps_what_is_shared() -> None:
    class Adapted(nn.Linear):
        """Does more than a product."""

    shared = nn.Linear(64, 64)
    model = nn.ModuleDict(
        {
            "a": shared,
            "b": shared,
            "own": Adapted(64, 64),
            "attention": nn.MultiheadAttention(64, 2),
        }
    ).bfloat16()
    assert swap(model, lambda name: True) == ["a", "b"] and model["a"] is model["b"]
    assert swap(model, lambda name: True) == [], "a second time nothing is left"
    assert type(model["own"]) is Adapted and model["attention"](*[gaussian(3, 64)] * 3)[0].shape == (3, 64)
    assert swap(nn.Linear(64, 64).bfloat16(), lambda name: True) == [], "the model itself has no name"

    tied = nn.ModuleDict({"embed": nn.Embedding(100, 64), "head": nn.Linear(64, 100, bias=False)}).bfloat16()
    tied["head"].weight = tied["embed"].weight
    before = tied["embed"].weight.clone()
    assert swap(tied, lambda name: True) == ["head"]
    assert torch.equal(tied["embed"].weight, before) and torch.equal(tied["head"].weight.dense(), before)


def test_swap_frees_each_weight_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).bfloat16()
    weights, alive = [weakref.ref(layer.weight) for layer in model], []
    original = linear.from_linear

    def watched(*words: Any, **named: Any) -> W12Weight:
        alive.append(sum(weight() is not None for weight in weights))
        return original(*words, **named)

    monkeypatch.setattr(linear, "from_linear", watched)
    swap(model, lambda name: True)
    assert alive == [3, 2, 1]


@settings(max_examples=60, deadline=None)
@given(
    n=st.one_of(st.integers(1, 4096), st.integers(1, 300_000)),
    k=st.integers(1, 512).map(lambda subtiles: 64 * subtiles),
    processors=st.sampled_from([1, 8, 114, 132, 144, 170]),
    record=st.sampled_from([16, 32, 64, 128]),
)
def test_any_matrix_has_launches_that_fit(n: int, k: int, processors: int, record: int) -> None:
    subtile = 1536 + record
    shapes = {m: autotune.heuristic(n, k, m, processors, subtile) for m in (1, 8, 16, 32, 64)}
    assert len({shape.parts for shape in shapes.values()}) == 1, "bits must not depend on the row count"
    head = {m: autotune.heuristic(n, k, m, processors, subtile, best=True) for m in (8, 64)}
    for best, m, shape in [(False, *item) for item in shapes.items()] + [(True, *item) for item in head.items()]:
        assert launchable(shape, n, k, m, subtile, processors, best), (shape, m, best)
        assert not best or shape.parts == 1


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 300_000), k=st.integers(1, 512).map(lambda subtiles: 64 * subtiles), m=st.sampled_from([1, 16, 33]),
    parts=st.sampled_from(autotune.PARTS), processors=st.sampled_from([114, 132]),
)  # fmt: skip
def test_candidates_are_launchable(n: int, k: int, m: int, parts: int, processors: int) -> None:
    for shape in autotune.candidates(n, k, parts, m, processors):
        assert shape.parts == parts and launchable(shape, n, k, m, autotune.W12_SUBTILE, processors), shape


def launchable(shape: gemm.Shape, n: int, k: int, m: int, subtile: int, processors: int, best: bool = False) -> bool:
    """The conditions of the CUDA launch, written down again: `launch`, `max_threads`, `row_warps_of`, `make_maps`, one round."""
    tokens = next(t for t in (8, 16, 32, 64) if m <= t)
    row_warps = -(-shape.width // 4) * 4 if shape.grouped else -(-shape.width // shape.rows)
    threads = 32 * (row_warps * shape.depth + 1)
    limit = 672 if shape.grouped else 352 if shape.rows == 2 else 512 if tokens == 64 else 640
    weights = -(-shape.width * shape.stage_subtiles * subtile // 128) * 128
    ring = 1024 + shape.stages * (weights + tokens * shape.stage_subtiles * 128) + row_warps * shape.depth * 2048
    lists = tokens * ((shape.width * 16 + 8) * 2 + 16 * 8) if best else 0
    sums = 1024 + shape.depth * shape.width * 16 * tokens * 4 if shape.parts > 1 else 0
    row_tiles = (n + 15) // 16
    groups = (row_tiles + shape.width - 1) // shape.width
    return (
        threads <= limit
        and 1 <= shape.stages <= 16
        and max(ring + lists, sums) + 512 <= 227 * 1024
        and k // 64 % shape.split == 0
        and shape.stage_subtiles % shape.depth == 0
        and max(shape.width, shape.stage_subtiles, subtile // 8) <= 256  # a box of the copy engine
        and (shape.parts == 1 or groups * shape.split <= processors)
    )


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
