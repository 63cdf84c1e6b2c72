"""The product on tiles in Triton, for CUDA cards and toolchains that the CUDA kernels do not serve. Exact, not fast.

Same tiles, same patches, so the weights that enter the product are the true BF16 words; it exists so that a packed
checkpoint runs everywhere, and as a second implementation to test the tiles with (also on a CPU, interpreted).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpilot.kernels.w12.layout import COLUMNS, W12_BYTES, Tiles


@triton.jit
def _rotate_right_8(word):  # type: ignore[no-untyped-def]
    return ((word >> 8) & 0xFFFFFF) | (word << 24)


@triton.jit
def _gemm(  # type: ignore[no-untyped-def]
    x, data, overflow, y, m, n, k, subtiles, words, BLOCK_M: tl.constexpr, EXACT32: tl.constexpr
):
    """One row tile (16 rows of the weight) and BLOCK_M tokens; data as int32, `words` of them a subtile."""
    tile = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 64)[None, :]
    lane = 4 * (row % 8) + (column // 2) % 4
    step = column // 16
    pair = (column // 8) % 2
    upper = row // 8  # registers 2 p and 2 p + 1
    half = 16 * (column % 2)
    byte_at = (step // 2) * 128 + lane * 4 + (step % 2) * 2 + pair
    code_at = 256 + lane * 4 + step
    place = step * 256 + lane * 8 + (2 * pair + upper) * 2 + column % 2
    acc = tl.zeros((16, BLOCK_M), dtype=tl.float32)
    for subtile in range(subtiles):
        base_at = data + (tile.to(tl.int64) * subtiles + subtile) * words
        byte = tl.load(base_at + byte_at)
        code = tl.load(base_at + code_at)
        byte = tl.where(upper == 1, _rotate_right_8(byte), byte)
        code = tl.where(pair == 1, _rotate_right_8(code), code)
        code = tl.where(upper == 1, code << 4, code)
        header = tl.load(base_at + 384)
        field = (byte >> half) & 0x807F
        exponent = ((code >> (half + 7)) & 15) + (header & 255) - 1
        word = (field + (exponent << 7)) & 0xFFFF
        count = header >> 8
        inline = count < words - 384
        first = tl.load(base_at + 385)
        for i in range(count):
            entry = tl.load(tl.where(inline, base_at + 385 + i, overflow + first + i))
            word = tl.where(place == ((entry >> 16) & 0xFFFF), entry & 0xFFFF, word)
        weight = (word << 16).to(tl.float32, bitcast=True)  # a BF16 word is the upper half of a float32
        at = subtile * 64 + tl.arange(0, 64)
        values = tl.load(x + token[None, :] * k + at[:, None], mask=token[None, :] < m, other=0.0)
        if EXACT32:
            acc += tl.dot(weight, values.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(weight.to(tl.bfloat16), values)
    rows = tile * 16 + tl.arange(0, 16)
    kept = (rows[:, None] < n) & (token[None, :] < m)
    tl.store(y + token[None, :] * n + rows[:, None], acc.to(y.dtype.element_ty), mask=kept)


def matmul(tiles: Tiles, x: Tensor, *, exact32: bool = False) -> Tensor:
    """y [m, N] = x [m, K] W^T. exact32: operands as float32 (the interpreter is wrong on bfloat16); y has x's type.

    Raises ValueError for paired or BF16 tiles and for a wrong K.
    """
    n, k = tiles.shape
    if tiles.kind != "w12" or tiles.paired:
        raise ValueError("the Triton product takes plain W12 tiles")
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be [rows, {k}], got {tuple(x.shape)}")
    m = x.shape[0]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    row_tiles, subtiles, size = tiles.data.shape
    assert size > W12_BYTES and k == subtiles * COLUMNS
    block = 16 if m <= 16 else 32 if m <= 32 else 64
    overflow = tiles.overflow if tiles.overflow.numel() else torch.zeros(1, dtype=torch.int32, device=x.device)
    grid = (row_tiles, triton.cdiv(m, block))
    with torch.cuda.device_of(x):  # Triton launches on the current device; nothing to do for a CPU tensor
        _gemm[grid](
            x.contiguous(),
            tiles.data.view(torch.int32),
            overflow,
            y,
            m,
            n,
            k,
            subtiles,
            size // 4,
            BLOCK_M=block,
            EXACT32=exact32,
        )
    return y
