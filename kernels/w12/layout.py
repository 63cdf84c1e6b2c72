"""Permute the planes of a W12 weight into the order in which a GPU warp consumes them, and back.

The unit is a *subtile*: 16 rows by 64 columns, the A operands of four `mma.m16n8k16` in a row, in the order that the
instruction defines: lane `4 g + q` of a warp owns rows g and g + 8, and register a of step s (16 columns) holds two
neighbouring columns, low half first:

    a = 2 p + r :  row g + 8 r,  columns 16 s + 8 p + 2 q + {0, 1}

A W12 subtile is three planes of 512 bytes, 16 bytes a lane: byte words of steps 0 and 1, of steps 2 and 3, code words.
With F = sign << 15 | mantissa in each half word, and c the code:

    byte word (s, p) = F(a = 2 p) | rotl(F(a = 2 p + 1), 8)
    code word s      = C(a0) | C(a1) >> 4 | rotl(C(a2) | C(a3) >> 4, 8),   C = c << 7 in each half word

so that a kernel needs 15 integer operations for 8 weights: three rotations, four masks, four multiply-adds (shift and
base at once), four merges. A BF16 subtile, for the twin kernel, is four planes: the registers of step s, 16 bytes a lane.

Behind the planes of each subtile lies its *record*, 16 bytes or a multiple: a header word, base | count << 8, then the
`count` weights to patch, each (offset << 16) | true word, ascending, the offset being the place of the half word in the
registers of a warp, [step, lane, a, half]. Where they do not fit, the word after the header says where they begin in the
overflow list. Plain torch, any device, a slice of row tiles at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specpilot.kernels.w12.format import Planes

ROWS = 16  # rows of a subtile
COLUMNS = 64  # columns of a subtile
W12_BYTES = ROWS * COLUMNS * 3 // 2
BF16_BYTES = ROWS * COLUMNS * 2
RECORD_BYTES = (16, 32, 64, 128)  # choices: 3, 7, 15 or 31 patches in place
OVERFLOW_RATE = 2e-3  # subtiles that may overflow before a longer record is taken
SLICE_WEIGHTS = 1 << 24  # weights in flight: below 1 GB of int64 temporaries
_FIELD = 0x807F  # sign and mantissa of a half word


@dataclass(frozen=True, eq=False)
class Tiles:
    """A weight [N, K] in tile order. `kind` is "w12" or "bf16" (the twin); all tensors lie on one device."""

    kind: str
    shape: tuple[int, int]
    """(N, K) as the caller sees it."""
    data: Tensor
    """uint8 [row tiles, K / 64, bytes of a subtile]: 1536 and a record, or 2048."""
    overflow: Tensor
    """int32 [entries]: the patches of subtiles whose record is too short."""
    paired: bool = False
    """Rows 8 t .. 8 t + 7 of the first and of the second half of N share a row tile (gate and up projections)."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device, everything counted."""
        return self.data.numel() + 4 * self.overflow.numel()

    def to(self, device: torch.device | str) -> Tiles:
        """The same tiles on another device."""
        return replace(self, data=self.data.to(device), overflow=self.overflow.to(device))


def check_shape(rows: int, columns: int, paired: bool = False) -> None:
    """Raise ValueError for a matrix that the tiles cannot hold."""
    if rows < 1 or columns < COLUMNS or columns % COLUMNS:
        raise ValueError(
            f"tiles hold matrices whose second dimension is a multiple of {COLUMNS}, got [{rows}, {columns}]: keep it in BF16"
        )
    if paired and rows % ROWS:
        raise ValueError(f"paired halves need a multiple of {ROWS} rows, got {rows}")


def tile_w12(planes: Planes, *, paired: bool = False, record_bytes: int | None = None) -> Tiles:
    """Planes to tiles. paired: see `Tiles.paired`. record_bytes: one of RECORD_BYTES, by default the
    shortest that serves.

    Needs a base that is constant over each 16 rows of a tile: one base, or a row_block that is a multiple of 16 (of 8
    and dividing N / 2, if paired, with equal bases in both halves). Raises ValueError otherwise.
    """
    rows, columns = planes.shape
    check_shape(rows, columns, paired)
    row_tiles, subtiles = -(-rows // ROWS), columns // COLUMNS
    order = _row_order(rows, paired, planes.bytes.device)
    records, overflow = _records(planes, _tile_bases(planes, order, row_tiles), paired, record_bytes)
    shape = (row_tiles, subtiles, W12_BYTES + records.shape[2])
    data = torch.empty(shape, dtype=torch.uint8, device=planes.bytes.device)
    data[:, :, W12_BYTES:] = records
    for start, stop in _slices(row_tiles, columns):
        wanted = order[start * ROWS : stop * ROWS]
        byte = _to_registers(_take(planes.bytes, wanted, 0))
        code = _to_registers(_take(planes.codes, wanted, 1))
        packed = _pack_registers(byte.long(), code.long())
        data[start:stop, :, :W12_BYTES] = packed.view(stop - start, subtiles, W12_BYTES)
    return Tiles("w12", planes.shape, data, overflow, paired)


def tile_bf16(weight: Tensor, *, paired: bool = False) -> Tiles:
    """A bfloat16 [N, K] to tiles of the twin kernel, which differs from the W12 kernel only in how weights are read."""
    rows, columns = weight.shape
    check_shape(rows, columns, paired)
    row_tiles, subtiles = -(-rows // ROWS), columns // COLUMNS
    order = _row_order(rows, paired, weight.device)
    data = torch.empty((row_tiles, subtiles, BF16_BYTES), dtype=torch.uint8, device=weight.device)
    bits = weight.contiguous().view(torch.int16)
    for start, stop in _slices(row_tiles, columns):
        registers = _to_registers(_take(bits, order[start * ROWS : stop * ROWS], 0))
        planes = registers.permute(0, 1, 3, 2, 4, 5).contiguous()  # [tile, subtile, step, lane, a, half]
        data[start:stop] = planes.view(torch.uint8).view(stop - start, subtiles, BF16_BYTES)
    nothing = torch.empty(0, dtype=torch.int32, device=weight.device)
    return Tiles("bf16", (rows, columns), data, nothing, paired)


def untile(tiles: Tiles) -> Tensor:
    """The bfloat16 [N, K] matrix, bit for bit: the plain-torch reference of what the kernel decodes."""
    rows, columns = tiles.shape
    row_tiles, subtiles = tiles.data.shape[:2]
    order = _row_order(rows, tiles.paired, tiles.data.device)
    words = torch.zeros((rows, columns), dtype=torch.int16, device=tiles.data.device)
    for start, stop in _slices(row_tiles, columns):
        data = tiles.data[start:stop]
        if tiles.kind == "bf16":
            registers = data.view(torch.int16).view(stop - start, subtiles, 4, 32, 4, 2).permute(0, 1, 3, 2, 4, 5)
        else:
            base = data[:, 0, W12_BYTES].long()
            words_of = data[:, :, :W12_BYTES].contiguous().view(torch.int32)
            registers = _unpack_registers(words_of.view(stop - start, subtiles, 3, 32, 4).long(), base)
        wanted = order[start * ROWS : stop * ROWS]
        kept = wanted < rows
        words[wanted[kept]] = _from_registers(registers)[kept]
    if tiles.kind == "w12":
        index, word = _listed(tiles, order)
        words.view(-1)[index] = word
    return words.view(torch.bfloat16)


# --- rows and registers -------------------------------------------------------------------------------------------


def _slices(row_tiles: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, SLICE_WEIGHTS // (ROWS * columns))
    for start in range(0, row_tiles, step):
        yield start, min(row_tiles, start + step)


def _row_order(rows: int, paired: bool, device: torch.device) -> Tensor:
    """int64 [row tiles * 16]: which row of the matrix lies at each place; `rows` and above are padding."""
    places = torch.arange(-(-rows // ROWS) * ROWS, device=device)
    if not paired:
        return places
    tile, row = places // ROWS, places % ROWS
    return tile * 8 + row % 8 + (row >= 8) * (rows // 2)


def _take(plane: Tensor, wanted: Tensor, padding: int) -> Tensor:
    taken = plane[wanted.clamp(max=plane.shape[0] - 1)]
    return taken.masked_fill_((wanted >= plane.shape[0]).unsqueeze(1), padding)


def _to_registers(plane: Tensor) -> Tensor:
    """[tiles * 16, K] to [tile, subtile, lane, step, a, half]."""
    tiles, subtiles = plane.shape[0] // ROWS, plane.shape[1] // COLUMNS
    split = plane.view(tiles, 2, 8, subtiles, 4, 2, 4, 2)  # tile, r, g, subtile, s, p, q, half
    return split.permute(0, 3, 2, 6, 4, 5, 1, 7).reshape(tiles, subtiles, 32, 4, 4, 2)


def _from_registers(registers: Tensor) -> Tensor:
    """Inverse of `_to_registers`."""
    tiles, subtiles = registers.shape[:2]
    split = registers.reshape(tiles, subtiles, 8, 4, 4, 2, 2, 2)  # tile, subtile, g, q, s, p, r, half
    return split.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(tiles * ROWS, subtiles * COLUMNS)


def _rotate(word: Tensor, left: int) -> Tensor:
    return ((word << left) | (word >> (32 - left))) & 0xFFFFFFFF


def _pair(field: Tensor) -> Tensor:
    """[..., 2] half words to one word."""
    return field[..., 0] | (field[..., 1] << 16)


def _to_int32(word: Tensor) -> Tensor:
    return (word - ((word & 0x80000000) << 1)).to(torch.int32)


def _pack_registers(byte: Tensor, code: Tensor) -> Tensor:
    """int64 [tile, subtile, lane, step, a, half] twice to uint8 [tile, subtile, plane, lane, 16]."""
    field = _pair(((byte & 0x80) << 8) | (byte & 0x7F))
    byte_word = field[..., 0::2] | _rotate(field[..., 1::2], 8)  # [tile, subtile, lane, step, p]
    shifted = _pair(code << 7)
    code_word = (shifted[..., 0] | (shifted[..., 1] >> 4)) | _rotate(shifted[..., 2] | (shifted[..., 3] >> 4), 8)
    halves = byte_word.unflatten(3, (2, 2)).flatten(4)  # [tile, subtile, lane, h, 4]
    planes = torch.stack([halves[:, :, :, 0], halves[:, :, :, 1], code_word], dim=2)
    return _to_int32(planes).contiguous().view(torch.uint8)


def _unpack_registers(planes: Tensor, base: Tensor) -> Tensor:
    """int64 [tile, subtile, plane, lane, 4] and int64 [tile] to int16 words [tile, subtile, lane, step, a, half]."""
    planes = planes & 0xFFFFFFFF
    byte_word = torch.stack([planes[:, :, 0], planes[:, :, 1]], dim=3).view(*planes.shape[:2], 32, 4, 2)
    field = torch.stack([byte_word, _rotate(byte_word, 24)], dim=-1).flatten(4)  # [..., step, a]
    code = planes[:, :, 2]
    turned = _rotate(code, 24)
    code_field = torch.stack([code, code << 4, turned, turned << 4], dim=-1)
    halves = []
    for shift in (0, 16):
        exponent = ((code_field >> (shift + 7)) & 15) + base.view(-1, 1, 1, 1, 1) - 1
        word = (((field >> shift) & _FIELD) + (exponent << 7)) & 0xFFFF
        halves.append((word - ((word & 0x8000) << 1)).to(torch.int16))
    return torch.stack(halves, dim=-1)


# --- bases and escapes --------------------------------------------------------------------------------------------


def _tile_bases(planes: Planes, order: Tensor, row_tiles: int) -> Tensor:
    """int64 [row tiles]."""
    if planes.row_block is None:
        return planes.base.long().expand(row_tiles).contiguous()
    row = order.clamp(max=planes.shape[0] - 1)
    base = planes.base.long()[row // planes.row_block].view(row_tiles, ROWS)
    if not bool((base == base[:, :1]).all()):
        raise ValueError(
            f"a base must hold for all 16 rows of a tile; row_block {planes.row_block} breaks that: encode with one base"
        )
    return base[:, 0].contiguous()


def _records(planes: Planes, base: Tensor, paired: bool, record_bytes: int | None) -> tuple[Tensor, Tensor]:
    """uint8 [row tiles, subtiles, record bytes] and the overflow list, int32."""
    rows, columns = planes.shape
    subtiles = columns // COLUMNS
    word = planes.escape_word.view(torch.int16).long() & 0xFFFF
    index, word = _with_partners(planes, base, planes.escape_index, word, paired)
    row, column = index // columns, index % columns
    tile, place = _place(row, rows, paired)
    key, by = ((tile * subtiles + column // COLUMNS) * 1024 + _offset(place, column % COLUMNS)).sort()
    subtile, entry = key // 1024, ((key % 1024) << 16) | word[by]
    counts = torch.bincount(subtile, minlength=base.numel() * subtiles)
    size = record_bytes or _shortest(counts)
    if size not in RECORD_BYTES:
        raise ValueError(f"record_bytes must be one of {RECORD_BYTES}, got {size}")
    records = torch.zeros((counts.numel(), size // 4), dtype=torch.int32, device=base.device)
    records[:, 0] = (base.repeat_interleave(subtiles) | (counts << 8)).to(torch.int32)
    overflowing = counts > size // 4 - 1
    spilled = counts.masked_fill(~overflowing, 0)
    records[overflowing, 1] = (spilled.cumsum(0) - spilled)[overflowing].to(torch.int32)
    within = torch.arange(key.numel(), device=base.device) - (counts.cumsum(0) - counts)[subtile]
    here = ~overflowing[subtile]
    records[subtile[here], 1 + within[here]] = _to_int32(entry[here])
    return records.view(torch.uint8).view(base.numel(), subtiles, size), _to_int32(entry[~here])


def _shortest(counts: Tensor) -> int:
    allowed = OVERFLOW_RATE * counts.numel()
    fitting = (size for size in RECORD_BYTES if int((counts > size // 4 - 1).sum()) <= allowed)
    return next(fitting, RECORD_BYTES[0])  # a matrix full of escapes: nothing helps, the list takes them all


def _with_partners(planes: Planes, base: Tensor, index: Tensor, word: Tensor, paired: bool) -> tuple[Tensor, Tensor]:
    """At base 0 a code 0 in the low half borrows from its neighbour in the register: list that neighbour as well."""
    if not index.numel() or int(base.min()) > 0:
        return index, word
    columns = planes.shape[1]
    tile, _ = _place(index // columns, planes.shape[0], paired)
    harmed = index[(index % 2 == 0) & (base[tile] == 0)] + 1
    harmed = harmed[~torch.isin(harmed, index)]
    byte = planes.bytes.view(-1)[harmed].long()
    exponent = planes.codes.view(-1)[harmed].long() - 1
    true = ((byte & 0x80) << 8) | (exponent << 7) | (byte & 0x7F)
    return torch.cat([index, harmed]), torch.cat([word, true])


def _place(row: Tensor, rows: int, paired: bool) -> tuple[Tensor, Tensor]:
    """Row of the matrix to (row tile, row in the tile)."""
    if not paired:
        return row // ROWS, row % ROWS
    half = row // (rows // 2)
    row = row - half * (rows // 2)
    return row // 8, row % 8 + 8 * half


def _offset(row: Tensor, column: Tensor) -> Tensor:
    """Place in a subtile to its half word in the register dump [step, lane, a, half], 0..1023."""
    lane = 4 * (row % 8) + column // 2 % 4
    register = 2 * (column // 8 % 2) + row // 8
    return column // 16 * 256 + lane * 8 + register * 2 + column % 2


def _listed(tiles: Tiles, order: Tensor) -> tuple[Tensor, Tensor]:
    """Flat index and int16 word of every patch, in place and in the list."""
    columns = tiles.shape[1]
    subtiles = tiles.data.shape[1]
    records = tiles.data[:, :, W12_BYTES:].contiguous().view(torch.int32).flatten(0, 1)
    counts = records[:, 0].long() >> 8
    room = records.shape[1] - 1
    at = torch.arange(room, device=records.device)
    subtile, word = (at < counts.masked_fill(counts > room, 0).unsqueeze(1)).nonzero(as_tuple=True)
    entry = records[subtile, 1 + word].long() & 0xFFFFFFFF
    full = (counts > room).nonzero().flatten()
    if full.numel():
        subtile = torch.cat([subtile, full.repeat_interleave(counts[full])])
        entry = torch.cat([entry, tiles.overflow.long() & 0xFFFFFFFF])
    offset, word = entry >> 16, entry & 0xFFFF
    step, lane, register, half = offset // 256, offset // 8 % 32, offset // 2 % 4, offset % 2
    row = lane // 4 + 8 * (register % 2)
    column = subtile % subtiles * COLUMNS + 16 * step + 8 * (register // 2) + 2 * (lane % 4) + half
    index = order[subtile // subtiles * ROWS + row] * columns + column
    return index, (word - ((word & 0x8000) << 1)).to(torch.int16)
