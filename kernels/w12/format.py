"""The logical planes of a W12 weight: encode, decode, and what they cost.

Every other file of this folder (tiles for the GPU, the container on disk, the C++ kernel) permutes these planes; none
defines a format of its own. Plain torch on any device, vectorised, a slice of rows at a time, no side effects.

A word is (sign << 15) | (exponent << 7) | mantissa. Per weight:

    byte = (sign << 7) | mantissa
    code = exponent - base + 1   where that lies in 1..15, else 0 (escape)

so that without a table, and without a carry into the sign because base + 14 <= 255:

    word = ((byte & 0x80) << 8) | (byte & 0x7f);  word += (code + base - 1) << 7

The base is shared by the tensor, or by each block of rows. It may be 0: then code 1 means exponent 0, so that zeros and
subnormals are ordinary weights, and a block of padding rows costs no escape.

An escaped weight has code 0 and the byte `ESCAPE_BYTE` = 0x80 (sign set, mantissa 0). Decoded without its patch it is
-2^(base-128) (-0 at base 1), hence finite unless base is 0. At base 0 it becomes 0x7f80: the addition of -1 << 7 borrows
from the weight's *own* sign bit. That is why the sign is set: two weights decoded by one 32-bit addition of
(base - 1) * 0x00800080 would otherwise borrow from the neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

VERSION = 1
CODES = 15  # exponents that one base reaches
MAX_BASE = 255 - (CODES - 1)  # 241
ESCAPE_BYTE = 0x80
CHUNK_WEIGHTS = 1 << 22  # weights in flight: the int32 and int64 temporaries of one slice stay below about 100 MB


@dataclass(frozen=True, eq=False)
class Planes:
    """One BF16 matrix [N, K] in 12 bits a weight, losslessly. All tensors lie on one device."""

    bytes: Tensor
    """uint8 [N, K]: (sign << 7) | mantissa; `ESCAPE_BYTE` where the code is 0."""
    codes: Tensor
    """uint8 [N, K], 0..15, one a byte (packing two into one is the layout's business)."""
    base: Tensor
    """int32 [1] (row_block None) or [ceil(N / row_block)], each 0..241."""
    row_block: int | None
    """Rows that share a base; None means all of them."""
    escape_index: Tensor
    """int64 [E], ascending: n * K + k of every weight whose code is 0."""
    escape_word: Tensor
    """uint16 [E]: the true word of each."""
    shape: tuple[int, int]
    """(N, K)."""

    @property
    def escape_rate(self) -> float:
        """Escapes per weight, 0..1 (0 for an empty matrix)."""
        return self.escape_index.numel() / max(1, self.shape[0] * self.shape[1])

    @property
    def bits_per_weight(self) -> float:
        """12 + the share of bases (32 bits each) and escapes (64 + 16 bits each); 0 for an empty matrix."""
        weights = self.shape[0] * self.shape[1]
        return 12 + (32 * self.base.numel() + 80 * self.escape_index.numel()) / weights if weights else 0.0


def encode(weight: Tensor, row_block: int | None = None, *, base: Tensor | None = None) -> Planes:
    """Split `weight` (bfloat16 [N, K], any strides and device) into planes.

    row_block: rows per base, None for one base. The base is the start of the fifteen exponents that hold most weights;
    among equals the largest, so that base 0 appears only where exponent 0 earns it. The result depends on nothing but
    the bits of `weight`. base: int32, one per block, for who has chosen already (`choose_base` over a larger matrix).
    Raises TypeError on another dtype, ValueError on another rank, a row_block below 1 or bases that do not fit.
    """
    _check_weight(weight, row_block)
    rows, columns = weight.shape
    if base is None:
        base = choose_base(exponent_counts(weight, row_block))
    elif base.dtype != torch.int32 or base.shape != (blocks_of(rows, row_block),):
        raise ValueError(f"{blocks_of(rows, row_block)} int32 bases are needed, got {base.dtype} {tuple(base.shape)}")
    elif base.numel() and not 0 <= int(base.min()) <= int(base.max()) <= MAX_BASE:
        raise ValueError(f"bases must lie in 0..{MAX_BASE}, got {int(base.min())}..{int(base.max())}")
    planes_bytes = torch.empty((rows, columns), dtype=torch.uint8, device=weight.device)
    codes = torch.empty_like(planes_bytes)
    indices, words = [], []
    for start, stop in _slices(rows, columns):
        word = _words(weight[start:stop])
        code = ((word >> 7) & 0xFF) + 1 - _row_base(base, row_block, start, stop)
        escaped = (code < 1) | (code > CODES)
        byte = ((word >> 8) & 0x80) | (word & 0x7F)
        planes_bytes[start:stop] = byte.masked_fill(escaped, ESCAPE_BYTE).to(torch.uint8)
        codes[start:stop] = code.masked_fill(escaped, 0).to(torch.uint8)
        found = escaped.flatten().nonzero().flatten()
        indices.append(found + start * columns)
        words.append(_to_int16(word.flatten()[found]))
    nothing = torch.empty(0, dtype=torch.int64, device=weight.device)
    return Planes(
        bytes=planes_bytes,
        codes=codes,
        base=base,
        row_block=row_block,
        escape_index=torch.cat([nothing, *indices]),
        escape_word=torch.cat([nothing.to(torch.int16), *words]).view(torch.uint16),
        shape=(rows, columns),
    )


def decode(planes: Planes) -> Tensor:
    """The bfloat16 [N, K] matrix that `encode` was given, bit for bit (NaN payloads and signed zeros too)."""
    rows, columns = planes.shape
    words = torch.empty((rows, columns), dtype=torch.int16, device=planes.bytes.device)
    for start, stop in _slices(rows, columns):
        byte = planes.bytes[start:stop].to(torch.int32)
        exponent = planes.codes[start:stop].to(torch.int32) + _row_base(planes.base, planes.row_block, start, stop) - 1
        words[start:stop] = _to_int16(((byte & 0x80) << 8) + (byte & 0x7F) + (exponent << 7))
    words.view(-1)[planes.escape_index] = planes.escape_word.view(torch.int16)
    return words.view(torch.bfloat16)


def _check_weight(weight: Tensor, row_block: int | None) -> None:
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"W12 holds bfloat16 weights, got {weight.dtype}: leave this tensor as it is")
    if weight.dim() != 2:
        raise ValueError(f"W12 holds matrices [N, K], got shape {tuple(weight.shape)}: leave this tensor as it is")
    if row_block is not None and row_block < 1:
        raise ValueError(f"row_block must be None or at least 1, got {row_block}")


def _slices(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about CHUNK_WEIGHTS weights each (at least one row)."""
    step = max(1, CHUNK_WEIGHTS // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _words(weight: Tensor) -> Tensor:
    """The 16-bit patterns as int32 0..65535."""
    return weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _to_int16(word: Tensor) -> Tensor:
    """int32 patterns to int16 with the same low 16 bits; wraps by arithmetic, not by an out-of-range cast."""
    word = word & 0xFFFF
    return (word - ((word & 0x8000) << 1)).to(torch.int16)


def _row_base(base: Tensor, row_block: int | None, start: int, stop: int) -> Tensor:
    """The base of each row of a slice: int32 [stop - start, 1] (or [1, 1], broadcast)."""
    if row_block is None:
        return base.view(1, 1)
    return base[torch.arange(start, stop, device=base.device) // row_block].unsqueeze(1)


def blocks_of(rows: int, row_block: int | None) -> int:
    """How many bases `rows` rows have."""
    return 1 if row_block is None else -(-rows // row_block)


def exponent_counts(weight: Tensor, row_block: int | None = None) -> Tensor:
    """How often each exponent occurs per block of rows of a bfloat16 [N, K]: int64 [blocks, 256]."""
    rows, columns = weight.shape
    blocks = blocks_of(rows, row_block)
    counts = torch.zeros(blocks * 256, dtype=torch.int64, device=weight.device)
    for start, stop in _slices(rows, columns):
        key = (_words(weight[start:stop]) >> 7) & 0xFF
        first = 0
        if row_block is not None:
            first = start // row_block
            block = torch.arange(start, stop, device=weight.device, dtype=torch.int32) // row_block - first
            key += 256 * block.unsqueeze(1)
        found = torch.bincount(key.flatten())
        counts[256 * first : 256 * first + found.numel()] += found
    return counts.view(blocks, 256)


def choose_base(counts: Tensor) -> Tensor:
    """The last best window start of each row of `counts` [blocks, 256]: int32 [blocks]."""
    return (MAX_BASE - _windows(counts).flip(1).argmax(1)).to(torch.int32)


def count_escapes(counts: Tensor) -> int:
    """Weights that the chosen bases do not reach."""
    return int((counts.sum(1) - _windows(counts).amax(1)).sum())


def _windows(counts: Tensor) -> Tensor:
    """Weights in the fifteen exponents from each start on: int64 [blocks, 242]."""
    total = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    return total[:, CODES:] - total[:, :-CODES]
