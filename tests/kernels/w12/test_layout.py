"""Tiles give every weight back, lie where the tensor-core instruction wants them, and refuse what they cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.layout import RECORD_BYTES, W12_BYTES, Tiles, tile_bf16, tile_w12, untile


def bits(weight: torch.Tensor) -> np.ndarray:
    return weight.contiguous().view(torch.int16).numpy().view(np.uint16)


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def every_pattern(seed: int = 0) -> torch.Tensor:
    words = np.random.default_rng(seed).permutation(65536).astype(np.uint16)
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(256, 256)


CASES = {
    "gaussian": gaussian(64, 256),
    "rows that fill no tile": gaussian(50, 192),
    "one row": gaussian(1, 64),
    "every pattern": every_pattern(),
    "zeros": torch.zeros(32, 128, dtype=torch.bfloat16),
    "one exponent, both signs": torch.tensor([1.5, -1.25] * 512, dtype=torch.bfloat16).view(16, 64),
    "base 0 with escapes": torch.zeros(32, 128, dtype=torch.bfloat16).index_fill(1, torch.tensor([0, 3, 77]), 2.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("record_bytes", [None, 16, 128])
def test_tiles_give_every_bit_back(name: str, record_bytes: int | None) -> None:
    weight = CASES[name]
    tiles = tile_w12(encode(weight), record_bytes=record_bytes)
    assert np.array_equal(bits(untile(tiles)), bits(weight))
    assert np.array_equal(bits(untile(tile_bf16(weight))), bits(weight))


@pytest.mark.parametrize("row_block", [16, 64])
def test_bases_per_row_block(row_block: int) -> None:
    weight = gaussian(128, 128) * torch.logspace(-6, 6, 128).unsqueeze(1).bfloat16()
    assert np.array_equal(bits(untile(tile_w12(encode(weight, row_block)))), bits(weight))


def test_paired_halves() -> None:
    weight = gaussian(96, 128)
    assert np.array_equal(bits(untile(tile_w12(encode(weight), paired=True))), bits(weight))
    assert np.array_equal(bits(untile(tile_bf16(weight, paired=True))), bits(weight))
    packed = tile_bf16(weight, paired=True).data[0, 0].view(torch.int16).view(4, 32, 4, 2)
    assert packed[0, 0, 0, 0] == weight.view(torch.int16)[0, 0], "row 0 of a tile is a gate"
    assert packed[0, 0, 1, 0] == weight.view(torch.int16)[48, 0], "row 8 of a tile is its partner"


def test_registers_follow_the_instruction() -> None:
    """mma.m16n8k16, A operand, from the PTX manual: a0 (g, 2q), a1 (g + 8, 2q), a2 (g, 2q + 8), a3 (g + 8, 2q + 8)."""
    weight = gaussian(32, 128, seed=3)
    words = bits(weight)
    data = tile_bf16(weight).data.numpy().view(np.uint16).reshape(2, 2, 4, 32, 4, 2)
    for tile, subtile, step, lane in np.ndindex(2, 2, 4, 32):
        g, q = divmod(lane, 4)
        for a, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            row, column = 16 * tile + g + down, 64 * subtile + 16 * step + 2 * q + right
            assert data[tile, subtile, step, lane, a].tolist() == words[row, column : column + 2].tolist()


def test_decoding_by_the_documented_operations() -> None:
    """The kernel's fifteen operations for eight weights, in numpy, on a matrix without escapes."""
    weight = (torch.rand(16, 64, generator=torch.Generator().manual_seed(1)) + 0.01).bfloat16()
    planes = encode(weight)
    assert planes.escape_index.numel() == 0
    data = tile_w12(planes).data[0, 0].numpy()
    byte0, byte1, code = data[:W12_BYTES].view(np.uint32).reshape(3, 32, 4)
    base = np.uint32((int(planes.base[0]) - 1) * 0x00800080)
    turn = lambda w: (w >> np.uint32(8)) | (w << np.uint32(24))  # noqa: E731
    field, high, low = np.uint32(0x807F807F), np.uint32(0x07800780), np.uint32(0x00780078)
    truth = tile_bf16(weight).data[0, 0].numpy().view(np.uint32).reshape(4, 32, 4)
    for step in range(4):
        source = (byte0, byte1)[step // 2]
        b0, b1, c = source[:, 2 * (step % 2)], source[:, 2 * (step % 2) + 1], code[:, step]
        registers = [
            (b0 & field) | ((c & high) + base),
            (turn(b0) & field) | ((c & low) * np.uint32(16) + base),
            (b1 & field) | ((turn(c) & high) + base),
            (turn(b1) & field) | ((turn(c) & low) * np.uint32(16) + base),
        ]
        assert np.array_equal(np.stack(registers, 1), truth[step])


def decoded(tiles: Tiles) -> np.ndarray:
    """Tiles by what the docstring of `layout` says, one weight after the other in a warp's registers: uint16 [N, K]."""
    rows, columns = tiles.shape
    row_tiles, subtiles = tiles.data.shape[:2]
    data = tiles.data.numpy().reshape(row_tiles * subtiles, -1)
    step, lane, a, half = np.indices((4, 32, 4, 2))
    p, r, g, q = a // 2, a % 2, lane // 4, lane % 4
    words = data[:, :W12_BYTES].copy().view("<u4").reshape(-1, 3, 32, 4).astype(np.uint64)
    byte = words[:, step // 2, lane, 2 * (step % 2) + p]
    code = words[:, 2, lane, step]
    byte = np.where(r, (byte >> 8 | byte << 24), byte) >> (16 * half).astype(np.uint64)
    code = np.where(p, (code >> 8 | code << 24), code) >> (16 * half).astype(np.uint64)
    code = np.where(r, code << 4, code) >> 7 & 15
    record = data[:, W12_BYTES:].copy().view("<u4").astype(np.int64)
    base, count = record[:, 0] & 255, record[:, 0] >> 8
    value = (byte & 0x8000) + (byte & 0x7F) + ((base[:, None, None, None, None] + code.astype(np.int64) - 1) << 7)
    value = value.astype(np.uint16).reshape(len(data), 1024)
    overflow = tiles.overflow.numpy().view(np.uint32)
    for i, many in enumerate(count):
        entries = record[i, 1 : 1 + many] if many < record.shape[1] else overflow[record[i, 1] : record[i, 1] + many]
        value[i, entries >> 16] = entries & 0xFFFF
    tile = np.arange(len(data)).reshape(-1, 1, 1, 1, 1)
    row = tile // subtiles * 16 + g + 8 * r
    if tiles.paired:
        row = tile // subtiles * 8 + g + r * (rows // 2)
    column = tile % subtiles * 64 + 16 * step + 8 * p + 2 * q + half
    kept, out = row < rows, np.zeros((rows, columns), np.uint16)
    out[row[kept], column[kept]] = value.reshape(row.shape)[kept]
    return out


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70), subtiles=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), record=st.sampled_from([None, *RECORD_BYTES]),
    exponents=st.sampled_from([1, 3, 15, 16, 40, 256]), first=st.integers(0, 255), block=st.sampled_from([None, 16, 64]), paired=st.booleans(),
)  # fmt: skip
def test_an_independent_decoder_reads_the_same_bits(
    rows: int, subtiles: int, seed: int, record: int | None, exponents: int, first: int, block: int | None, paired: bool
) -> None:
    rows, block = (rows + 15) // 16 * 16 if paired else rows, None if paired else block
    random, shape = np.random.default_rng(seed), (rows, 64 * subtiles)
    exponent = (first + random.integers(0, exponents, shape) * (random.random(shape) < 0.5)) % 256
    words = (random.integers(0, 2, shape) << 15 | exponent << 7 | random.integers(0, 128, shape)).astype(np.uint16)
    weight = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    tiles = tile_w12(encode(weight, block), paired=paired, record_bytes=record)
    assert np.array_equal(decoded(tiles), words)
    assert np.array_equal(bits(untile(tiles)), words)


def test_records_hold_few_escapes_and_spill_many() -> None:
    few, many = tile_w12(encode(gaussian(512, 512))), tile_w12(encode(every_pattern()))
    assert few.data.shape[2] == W12_BYTES + 16 and few.overflow.numel() <= 8
    assert many.overflow.numel() > 50_000
    assert few.nbytes * 8 / 512 / 512 < 12.2
    crowded = gaussian(64, 64)
    crowded.view(-1)[torch.arange(0, 4096, 200)] = 1e30  # about five a subtile: past 16 bytes, within 32
    assert tile_w12(encode(crowded)).data.shape[2] == W12_BYTES + 32
    assert set(RECORD_BYTES) == {16, 32, 64, 128}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        tile_w12(encode(gaussian(16, 100)))
    with pytest.raises(ValueError, match="all 16 rows"):
        tile_w12(encode(gaussian(32, 64) * torch.logspace(-9, 9, 32).unsqueeze(1).bfloat16(), 3))
    with pytest.raises(ValueError, match="paired halves"):
        tile_w12(encode(gaussian(24, 64)), paired=True)
    with pytest.raises(ValueError, match="record_bytes"):
        tile_w12(encode(gaussian(16, 64)), record_bytes=24)
