"""The W12 format is exact for every bit pattern and any mixture of them; the decode formula is checked in plain numpy."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.kernels.w12 import format as w12

EVERY_PATTERN = np.arange(65536, dtype=np.uint16)
BLOCKS = [None, 1, 3, 64, 128]


def bf16(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def words(weight: torch.Tensor) -> np.ndarray:
    return weight.contiguous().view(torch.int16).numpy().view(np.uint16)


def from_planes(planes: w12.Planes) -> np.ndarray:
    """The published formula, weight by weight: an implementation that shares nothing with `decode`."""
    rows, columns = planes.shape
    out = np.empty(rows * columns, np.uint16)
    base, byte, code = planes.base.numpy(), planes.bytes.numpy().ravel(), planes.codes.numpy().ravel()
    escaped = dict(zip(planes.escape_index.tolist(), planes.escape_word.view(torch.int16).tolist(), strict=True))
    for i in range(rows * columns):
        if code[i] == 0:
            out[i] = escaped.pop(i) & 0xFFFF
        else:
            block = 0 if planes.row_block is None else i // columns // planes.row_block
            sign, mantissa = int(byte[i]) >> 7, int(byte[i]) & 127
            out[i] = (sign << 15) | ((int(base[block]) + int(code[i]) - 1) << 7) | mantissa
    assert not escaped, "an escape without code 0"
    return out.reshape(rows, columns)


def check(pattern: np.ndarray, row_block: int | None) -> w12.Planes:
    planes = w12.encode(bf16(pattern), row_block)
    assert np.array_equal(words(w12.decode(planes)), pattern)
    assert np.array_equal(from_planes(planes), pattern)
    assert int(planes.codes.max()) <= 15
    assert (planes.bytes[planes.codes == 0] == w12.ESCAPE_BYTE).all()
    assert torch.equal(planes.escape_index, (planes.codes.flatten() == 0).nonzero().flatten())
    return planes


@pytest.mark.parametrize("row_block", BLOCKS)
@pytest.mark.parametrize("shape", [(256, 256), (1, 65536), (65536, 1)])
def test_every_pattern_survives(shape: tuple[int, int], row_block: int | None) -> None:
    pattern = EVERY_PATTERN.reshape(shape)
    planes = w12.encode(bf16(pattern), row_block)
    assert np.array_equal(words(w12.decode(planes)), pattern)
    if shape == (256, 256):
        assert np.array_equal(from_planes(planes), pattern)
    if row_block is None:
        assert planes.escape_rate == 241 / 256, "fifteen exponents of 256 are reached, each as often as the others"
        assert planes.bits_per_weight == pytest.approx(12 + 80 * 241 / 256 + 32 / 65536)


@pytest.mark.parametrize("row_block", BLOCKS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mixture_survives(row_block: int | None, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    some = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))
    exponent = data.draw(arrays.arrays(np.uint16, shape, elements=st.sampled_from(some)))
    rest = data.draw(arrays.arrays(np.uint16, shape, elements=st.integers(0, 255)))
    check((exponent << 7) | (rest & 127) | ((rest >> 7) << 15), row_block)


@pytest.mark.parametrize("exponent", range(256))
def test_one_exponent_costs_no_escape(exponent: int) -> None:
    byte = EVERY_PATTERN[:256]
    pattern = ((byte & 0x80) << 8) | (exponent << 7) | (byte & 0x7F)
    planes = w12.encode(bf16(pattern.reshape(16, 16)))
    assert planes.escape_index.numel() == 0 and planes.escape_rate == 0
    assert planes.base.tolist() == [min(exponent, w12.MAX_BASE)], "the largest base among equals, and never above 241"
    assert np.array_equal(words(w12.decode(planes)), pattern.reshape(16, 16))


def test_zeros_and_subnormals_are_ordinary_weights() -> None:
    pattern = np.array(
        [[0x0000, 0x8000, 0x0001, 0x807F]], np.uint16
    )  # +0, -0, the smallest, the largest negative subnormal
    planes = check(pattern, None)
    assert planes.base.tolist() == [0] and planes.codes.tolist() == [[1, 1, 1, 1]]
    assert planes.bytes.tolist() == [[0, 0x80, 1, 0xFF]]


def test_window_holds_most_weights() -> None:
    random = np.random.default_rng(0)
    exponent = np.clip(np.round(random.normal(118, 4, (64, 64))), 0, 255).astype(np.uint16)
    counts = np.bincount(exponent.ravel(), minlength=256)
    best = max(counts[start : start + 15].sum() for start in range(242))
    planes = check(exponent << 7, None)
    assert planes.escape_index.numel() == 64 * 64 - best


def test_worst_case_all_but_a_window_escape() -> None:
    pattern = np.tile(np.array([10 << 7, 10 << 7, 200 << 7], np.uint16), (4, 1))
    planes = check(pattern, None)
    assert planes.base.tolist() == [10] and planes.escape_index.tolist() == [2, 5, 8, 11]
    planes = w12.encode(bf16(pattern), base=torch.tensor([100], dtype=torch.int32))  # a base that nothing needs
    assert planes.escape_rate == 1 and np.array_equal(words(w12.decode(planes)), pattern)


def test_pairwise_addition_never_borrows_from_the_neighbour() -> None:
    """The GPU decodes two weights by one 32-bit addition; an escape beside a weight must not change that weight."""
    for base in (0, 1, 100, 241):
        low = np.array([[0x80 << 8 | 5 << 7, (base << 7) | 3]], np.uint16)
        planes = w12.encode(bf16(low), base=torch.tensor([base], dtype=torch.int32))
        byte, code = planes.bytes[0].to(torch.int64), planes.codes[0].to(torch.int64)
        packed = int(byte[0] | byte[1] << 16)
        pair = ((packed & 0x00800080) << 8) | (packed & 0x007F007F)
        pair += int(code[0] | code[1] << 16) << 7
        pair = (pair + (base - 1) * 0x00800080) & 0xFFFFFFFF
        assert pair >> 16 == low[0, 1], base


@pytest.mark.parametrize("row_block", [64, 128])
def test_padding_rows_cost_nothing_with_a_base_of_their_own(row_block: int) -> None:
    weight = torch.randn(256, 96, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weight[128:] = 0
    planes = w12.encode(weight, row_block)
    assert planes.base.numel() == 256 // row_block
    assert planes.escape_rate < 0.001 < 0.4 < w12.encode(weight).escape_rate
    assert torch.equal(w12.decode(planes), weight)


def test_slices_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(333, 21, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = w12.encode(weight, 64)
    monkeypatch.setattr(w12, "CHUNK_WEIGHTS", 100)
    sliced = w12.encode(weight, 64)
    for name in ("bytes", "codes", "base", "escape_index"):
        assert torch.equal(getattr(whole, name), getattr(sliced, name)), name
    assert torch.equal(whole.escape_word.view(torch.int16), sliced.escape_word.view(torch.int16))
    assert torch.equal(w12.decode(sliced), weight)


def test_strided_weights_are_encoded_as_they_look() -> None:
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(2)).bfloat16().t()
    assert torch.equal(w12.decode(w12.encode(weight)), weight)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("row_block", [None, 64])
def test_empty_matrices(shape: tuple[int, int], row_block: int | None) -> None:
    planes = w12.encode(torch.empty(shape, dtype=torch.bfloat16), row_block)
    assert w12.decode(planes).shape == shape
    assert planes.bits_per_weight == 0 and planes.escape_rate == 0


def test_refusals() -> None:
    with pytest.raises(TypeError, match="float32"):
        w12.encode(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        w12.encode(torch.zeros(2, 2, 2, dtype=torch.bfloat16))
    weight = torch.zeros(130, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="row_block"):
        w12.encode(weight, 0)
    with pytest.raises(ValueError, match="3 int32 bases"):
        w12.encode(weight, 64, base=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="0..241"):
        w12.encode(weight, base=torch.tensor([242], dtype=torch.int32))
