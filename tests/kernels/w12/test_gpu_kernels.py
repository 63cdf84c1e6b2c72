"""The CUDA kernels on a card: exact weights, one result per row however many ride along, fused variants, graphs.

Run with `python -m pytest -m gpu tests/kernels/w12` (deselected by default).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specpilot.kernels.w12 import gemm, linear
from specpilot.kernels.w12.autotune import heuristic
from specpilot.kernels.w12.container.checkpoint import pack
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.gemm import Shape
from specpilot.kernels.w12.layout import Tiles, tile_bf16, tile_w12
from specpilot.kernels.w12.linear import W12GateUp, W12Head, W12Linear, W12Weight, from_linear, swap
from specpilot.kernels.w12.load import load_packed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

ROWS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64)
SHAPES = (
    Shape(4),
    Shape(4, rows=2),
    Shape(3, stage_subtiles=1, stages=3),
    Shape(5, split=2),
    Shape(5, split=2, rows=2, stages=3),
    Shape(4, depth=2, boxed=False),
    Shape(5, rows=2, boxed=False),
    Shape(3, split=2, depth=4, stages=2, stage_subtiles=4),
    Shape(8, rows=2, depth=2, stages=2),
    Shape(4, grouped=True),
    Shape(5, split=2, grouped=True, boxed=False),
    Shape(6, depth=2, grouped=True, stages=3),
    Shape(3, split=2, depth=4, stages=2, stage_subtiles=4, grouped=True),
)


def gaussian(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def every_pattern() -> torch.Tensor:
    words = np.random.default_rng(0).permutation(65536).astype(np.uint16).view(np.int16)
    return torch.from_numpy(words).view(torch.bfloat16).view(256, 256).cuda()


def heavy() -> torch.Tensor:
    """One weight in ten outside the window."""
    return (torch.randn(256, 512, device="cuda") ** 9).bfloat16()


def zeros() -> torch.Tensor:
    """Padding rows, as vocabularies have them: base 0 under a base per block of rows."""
    weight = gaussian(256, 512)
    weight[64:192] = 0
    weight[70, 3] = 1.0
    return weight


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def product(tiles: Tiles, x: torch.Tensor, shape: Shape, *, residual: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.full((x.shape[0], tiles.shape[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
    gemm.launch(tiles, x, y, shape, residual=residual)
    return y


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"w{s.width}r{s.manner}s{s.split}d{s.depth}")
@pytest.mark.parametrize(
    "make",
    [lambda: gaussian(512, 1024), lambda: gaussian(250, 576), lambda: gaussian(250, 640), heavy, zeros],
    ids="gpqhz",
)
def test_bits_of_the_twin_and_of_any_row_count(shape: Shape, make: object) -> None:
    weight = make()  # type: ignore[operator]
    packed, twin = tile_w12(encode(weight, 64)), tile_bf16(weight)
    x = torch.randn(64, weight.shape[1], device="cuda").bfloat16()
    if weight.shape[1] // 64 % shape.split:
        with pytest.raises(ValueError, match="does not divide"):
            product(packed, x, shape)
        return
    alone = product(packed, x[:1], shape)
    reference = x.double() @ weight.double().T
    # Half a unit in the last of BF16's 8 bits, and float32 additions of terms that may be far larger than their sum.
    allowed = 2**-8 * reference.abs() + 2**-16 * (x.double().abs() @ weight.double().abs().T)
    for m in ROWS:
        if not shape.fits(2048, m):
            continue
        y = product(packed, x[:m], shape)
        assert same_bits(y, product(twin, x[:m], shape)), "12-bit and BF16 weights give different bits"
        assert same_bits(y[:1], alone), "a row's result depends on the others"
        assert ((y.double() - reference[:m]).abs() <= allowed[:m]).all()


def test_every_pattern_reaches_the_product() -> None:
    """One-hot activations read the weight out: every finite pattern comes back, NaN and infinity as themselves."""
    weight = every_pattern()
    packed = tile_w12(encode(weight))
    out = torch.empty_like(weight)
    gemm.expand(packed, out)
    assert same_bits(out, weight)
    finite = torch.where(weight.isfinite() & (weight.abs() > 1e-30), weight, torch.ones_like(weight))
    packed, eye = tile_w12(encode(finite)), torch.eye(256, device="cuda").bfloat16()
    for start in range(0, 256, 64):
        y = product(packed, eye[start : start + 64], Shape(4))
        assert same_bits(y, finite.T[start : start + 64].contiguous())


def test_only_the_number_of_parts_decides_the_bits() -> None:
    weight = gaussian(512, 1024)
    packed = tile_w12(encode(weight))
    x = torch.randn(64, 1024, device="cuda").bfloat16()
    for parts in (1, 2, 4, 8):
        results = []
        for m in (1, 64):
            for split in (s for s in (1, 2, 4) if parts % s == 0 and parts // s <= 4):
                for grouped, boxed in ((False, True), (False, False), (True, True), (True, False)):
                    shape = Shape(
                        4, split=split, depth=parts // split, stage_subtiles=4, stages=2, grouped=grouped, boxed=boxed
                    )
                    if shape.fits(packed.data.shape[2], m):
                        results.append(product(packed, x[:m], shape)[:1])
        assert len(results) >= 8 and all(same_bits(r, results[0]) for r in results), f"{parts} parts"
    assert not same_bits(product(packed, x, Shape(4)), product(packed, x, Shape(4, depth=2))), "parts do change bits"


def test_expand_both_formats() -> None:
    for weight in (gaussian(250, 576), heavy(), zeros()):
        for tiles in (tile_w12(encode(weight)), tile_bf16(weight)):
            out = torch.empty_like(weight)
            gemm.expand(tiles, out)
            assert same_bits(out, weight)
    weight, out = gaussian(512, 256), torch.empty(512, 256, dtype=torch.bfloat16, device="cuda")
    gemm.expand(tile_w12(encode(weight), paired=True), out)
    assert same_bits(out, weight)


def test_residual_and_norm() -> None:
    weight, x, residual = (
        gaussian(512, 1024),
        torch.randn(5, 1024, device="cuda").bfloat16(),
        gaussian(5, 512, scale=1.0),
    )
    for shape in (Shape(4), Shape(5, split=2), Shape(4, depth=2)):
        packed = tile_w12(encode(weight))
        assert same_bits(product(packed, x, shape, residual=residual), product(packed, x, shape) + residual)


@pytest.mark.parametrize("columns", [64, 1024, 5120, 6656, 12288])
def test_norm_against_float64(columns: int) -> None:
    x, other = (torch.randn(5, columns, device="cuda").bfloat16() for _ in range(2))
    gain = torch.rand(columns, device="cuda").bfloat16()
    for residual in (None, other):
        for centred in (False, True):
            total, y = (torch.empty_like(x) if residual is not None else None), torch.empty_like(x)
            gemm.add_norm(x, gain, y, residual=residual, total=total, eps=1e-6, centred=centred)
            summed = x if residual is None else x + residual
            assert total is None or same_bits(total, summed)
            wide = summed.double()
            expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (centred + gain.double())
            torch.testing.assert_close(
                y.double(), expected, rtol=2**-8, atol=0
            )  # half a BF16 step, and float32 before it
    with pytest.raises(ValueError, match="multiple of 8"):
        gemm.add_norm(x[:, :60].contiguous(), gain[:60].clone(), torch.empty_like(x[:, :60].contiguous()))


@pytest.mark.parametrize("m", [1, 7, 16, 64])
def test_gate_up_equals_separate_operations(m: int) -> None:
    gate, up = gaussian(512, 1024), gaussian(512, 1024)
    x = torch.randn(m, 1024, device="cuda").bfloat16() * 3
    layer = W12GateUp(gate, up)
    shape = heuristic(1024, 1024, m, 132)
    both = product(tile_w12(encode(torch.cat([gate, up]))), x, shape)
    expected = F.silu(both[:, :512]) * both[:, 512:]
    out = torch.empty_like(expected)
    gemm.launch(layer.weight.tiles, x, out, shape, gemm.SILU)
    different = (out != expected).float().mean().item()
    assert different < 2e-3, "only the last bit of exp may differ"
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("m", [1, 5, 16, 33, 64, 70])
def test_head_without_logits(m: int) -> None:
    weight = gaussian(9000, 512)
    weight[8000] = weight[100]
    x = torch.randn(m, 512, device="cuda").bfloat16()
    x[0] = weight[100] * 2000  # its own best token, twice
    head = W12Head(from_linear(weight))
    shape = heuristic(9000, 512, min(m, 64), 132, best=True)
    logits = torch.cat([product(head.weight.tiles, part, shape) for part in x.split(64)]).float()
    value, index = head.top(x, 16)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(value, expected.values[:, :16])
    assert torch.equal(index, expected.indices[:, :16])
    assert torch.equal(head.argmax(x), expected.indices[:, 0])
    assert index[0, 0] == 100 and index[0, 1] == 8000


def test_layers_in_a_graph_and_above_the_crossover() -> None:
    dense = torch.nn.Linear(512, 768, bias=True, device="cuda", dtype=torch.bfloat16)
    layer = W12Linear.from_dense(dense, dependent=True)
    x = torch.randn(8, 512, device="cuda").bfloat16()
    out = torch.empty(8, 768, dtype=torch.bfloat16, device="cuda")
    expected = layer(x).clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            layer(x, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, expected)
    torch.testing.assert_close(out, dense(x), rtol=2e-2, atol=2e-2)
    many = torch.randn(200, 512, device="cuda").bfloat16()
    assert torch.equal(layer(many), dense(many)), "above the crossover the library computes, on the same bits"


def test_a_moved_or_cast_head_and_a_biased_layer_in_place() -> None:
    weight, x = gaussian(9000, 512), torch.randn(3, 512, device="cuda").bfloat16()
    expected = W12Head(from_linear(weight)).argmax(x)
    head = W12Head(from_linear(weight.cpu()))
    with pytest.raises(ValueError, match="move one of them"):
        head.argmax(x)
    assert torch.equal(head.cuda().argmax(x), expected), "lists for the best logits are made where the head lies now"
    assert torch.equal(head.bfloat16().argmax(x), expected), "a cast does not shorten them"
    with pytest.raises(ValueError, match="contiguous int64"):
        head.argmax(x, torch.empty(3, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match="two lists"):
        short = torch.empty(16, device="cuda"), torch.empty(16, dtype=torch.int32, device="cuda")
        gemm.launch(head.weight.tiles, x, None, heuristic(9000, 512, 3, 132, best=True), gemm.BEST, best=short)
    layer = W12Linear.from_dense(torch.nn.Linear(512, 768, device="cuda", dtype=torch.bfloat16))
    residual = torch.randn(3, 768, device="cuda").bfloat16()
    total = layer(x) + residual
    assert same_bits(layer(x, residual, out=residual), total)


def test_triton_product() -> None:
    triton_gemm = pytest.importorskip("specpilot.kernels.w12.triton_gemm")
    for weight in (gaussian(250, 576), heavy()):
        x = torch.randn(9, weight.shape[1], device="cuda").bfloat16()
        y = triton_gemm.matmul(tile_w12(encode(weight)), x).double()
        reference = x.double() @ weight.double().T
        assert ((y - reference).norm() / reference.norm()).item() < 3e-3


def test_nan_logits_are_above_all_as_in_torch() -> None:
    weight, x = gaussian(1024, 512), gaussian(6, 512, scale=1.0)
    weight[700, 3] = weight[130, 3] = float("nan")
    x[1] = float("nan")
    head, logits = W12Head(from_linear(weight)), F.linear(x, weight)
    assert head.argmax(x).tolist() == logits.argmax(-1).tolist() == [130, 0, 130, 130, 130, 130]
    value, index = head.top(x, 3)
    assert index[0, :2].tolist() == [130, 700] and value[0, :2].isnan().all() and not value[0, 2].isnan()
    assert index[1].tolist() == [0, 1, 2]


def test_an_outgrown_scratch_serves_the_graph_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_scratch", {})  # others may have made a large one
    small, large = from_linear(gaussian(256, 256)), from_linear(gaussian(4096, 4096))
    rows = linear.EXPAND_ABOVE + 1
    x = gaussian(rows, 256, scale=1.0)
    expected = small.product(x).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = small.product(x)
    large.product(gaussian(rows, 4096))
    filler = [torch.full((256, 256), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(y, expected) and all(f.isnan().all() for f in filler)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_a_card_that_is_not_the_current_one() -> None:
    weight, x = gaussian(1024, 512), gaussian(9, 512, scale=1.0)
    layers = [W12Linear(from_linear(weight.to(device))) for device in ("cuda:0", "cuda:1")]
    heads = [W12Head(layer.weight) for layer in layers]
    inputs = [x, x.to("cuda:1")]
    assert torch.cuda.current_device() == 0
    for rows in (9, 1):
        here, there = (layer(given[:rows]) for layer, given in zip(layers, inputs, strict=True))
        assert there.device.index == 1 and same_bits(here, there.to("cuda:0"))
        best, other = (head.argmax(given[:rows]) for head, given in zip(heads, inputs, strict=True))
        assert torch.equal(best, other.to("cuda:0"))
    assert same_bits(layers[1].weight.dense().to("cuda:0"), weight), "the expansion"
    assert torch.cuda.current_device() == 0


FALLEN_BACK = """
import torch, torch.nn.functional as F
from specpilot.kernels.w12.linear import W12GateUp, W12Head, W12Linear, from_linear
torch.manual_seed(0)
def random(*shape): return (torch.randn(*shape, device="cuda") * 0.05).bfloat16()
def close(y, reference): assert ((y.double() - reference).norm() / reference.norm()).item() < 4e-3
weight, x, residual = random(768, 512), random(70, 512), random(70, 768)
close(W12Linear(from_linear(weight))(x, residual), x.double() @ weight.double().T + residual.double())
gate, up = weight.chunk(2)
close(W12GateUp(gate, up)(x), F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T))
logits, head = F.linear(x, weight).float(), W12Head(from_linear(weight))
assert torch.equal(head.argmax(x), logits.argmax(-1)) and torch.equal(head.top(x, 4)[0], logits.topk(4).values)
print("fell back")
"""


def test_layers_where_the_kernels_do_not_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    broken = {"SPECPILOT_CACHE": str(tmp_path), "SPECPILOT_W12_NVCC_FLAGS": "--no-such-flag"}
    ran = subprocess.run([sys.executable, "-c", FALLEN_BACK], env=os.environ | broken, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "fell back\n", ran.stderr
    assert "W12 falls back to Triton" in ran.stderr and "no-such-flag" in ran.stderr


def test_refusals() -> None:
    tiles, x = tile_w12(encode(gaussian(64, 256))), torch.randn(65, 256, device="cuda").bfloat16()
    y = torch.empty(65, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="1..64 rows"):
        gemm.launch(tiles, x, y, Shape(4))
    with pytest.raises(ValueError, match="y must be"):
        gemm.launch(tiles, x[:2], y, Shape(4))
    with pytest.raises(ValueError, match="one round"):
        gemm.launch(tile_w12(encode(gaussian(4096, 256))), x[:1], y.new_empty(1, 4096), Shape(1, depth=2))
    assert W12Weight(tiles).dense().shape == (64, 256)


def test_a_model_swapped_by_name_runs_in_a_graph(tmp_path: Path) -> None:
    transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(512, (1, 8), device="cuda")
    with torch.no_grad():
        library = model(tokens, use_cache=False).logits.double()
        original = copy.deepcopy(model)
        reference = copy.deepcopy(model).double()(tokens, use_cache=False).logits
        replaced = swap(model, lambda name: True)
        assert len(replaced) == 2 * 7 + 1 and "lm_head" in replaced
        ours = model(tokens, use_cache=False).logits
        error = (ours.double() - reference).norm() / reference.norm()
        assert error <= 1.5 * (library - reference).norm() / reference.norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(tokens, use_cache=False).logits
        tokens.copy_(torch.randint(512, (1, 8), device="cuda"))
        graph.replay()
        assert same_bits(captured, model(tokens, use_cache=False).logits)

        # The same weights packed on disk, into a model without memory of its own.
        original.save_pretrained(tmp_path / "dense")
        pack(tmp_path / "dense", tmp_path / "packed")
        with accelerate.init_empty_weights():
            loaded = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        assert len(load_packed(loaded, tmp_path / "packed", device="cuda")) == 2 * 5 + 1, (
            "k and v are too small to pack"
        )
        assert len(swap(loaded.cuda().eval(), lambda name: True)) == 2 * 2
        assert same_bits(loaded(tokens, use_cache=False).logits, captured)
