"""Writing one packed safetensors file, slice by slice: nothing larger than a slice is ever held."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..errors import BadCheckpoint
from ..format import decode, encode, exponent_counts
from . import policy
from .blob import Sections, Stored, align_up, metadata_of, pack_nibbles, rows_per_slice
from .safetensors_file import ITEM_BYTES, MAX_HEADER, Entry, SafetensorsFile, header_text

_WIDEST = 10**19  # no number in a header is wider; used to reserve room for it


def pack_file(
    source: SafetensorsFile, path: Path, table_is_head: bool, row_block: policy.RowBlock, max_escape_rate: float
) -> dict[str, Stored]:
    """Write `source` packed to `path` (which must not exist). Returns what became of each tensor, in the file's order.

    Holds one slice of one matrix in memory. Every slice is decoded again and compared before it is written.
    """
    with path.open("xb") as file:
        room = _reserve(source)
        if room > MAX_HEADER:
            raise BadCheckpoint(
                f"{source.path} has too many tensors ({len(source.entries)}): a packed header would outgrow what readers take",
                "save the checkpoint in more, smaller files.",
            )
        at, stored, places = room, {}, []
        rest = []
        for entry in source.entries:
            reason = policy.reason_to_keep(entry.name, entry.dtype, entry.shape, table_is_head)
            bases = None if reason else policy.choose(_count(source, entry), row_block, max_escape_rate)
            if bases and bases.escapes > max_escape_rate * entry.shape[0] * entry.shape[1]:
                reason = f"{100 * bases.escapes / (entry.shape[0] * entry.shape[1]):.2f} % escapes"
                bases = None
            if bases is None:
                rest.append((entry, reason))
                continue
            kept = _write_blob(source, entry, bases, file, at)
            stored[entry.name] = kept
            places.append(Entry(entry.name, "U8", (kept.stored_bytes,), at, kept.stored_bytes))
            at += kept.stored_bytes
        for entry, reason in sorted(rest, key=lambda pair: -ITEM_BYTES.get(pair[0].dtype, 1)):
            file.seek(at)
            digest = _copy(source, entry, file)
            stored[entry.name] = Stored(False, entry.dtype, entry.shape, digest, entry.size, reason)
            places.append(Entry(entry.name, entry.dtype, entry.shape, at, entry.size))
            at += entry.size
        stored = {entry.name: stored[entry.name] for entry in source.entries}
        _write_header(file, metadata_of(source.header, stored), places, room)
        file.flush()
        os.fsync(file.fileno())
    return stored


def _matrix(source: SafetensorsFile, entry: Entry, first: int, last: int) -> Tensor:
    """Rows of a BF16 matrix."""
    columns = entry.shape[1]
    raw = source.read(entry.offset + 2 * first * columns, 2 * (last - first) * columns)
    return torch.frombuffer(raw, dtype=torch.bfloat16).view(last - first, columns)


def _row_slices(entry: Entry) -> Iterator[tuple[int, int]]:
    step = rows_per_slice(entry.shape)
    for first in range(0, entry.shape[0], step):
        yield first, min(entry.shape[0], first + step)


def _count(source: SafetensorsFile, entry: Entry) -> Tensor:
    slices = _row_slices(entry)
    return torch.cat([exponent_counts(_matrix(source, entry, *rows), policy.COUNTED_ROWS) for rows in slices])


def _write_blob(source: SafetensorsFile, entry: Entry, bases: policy.Bases, file: BinaryIO, start: int) -> Stored:
    rows, columns = entry.shape
    at = Sections.of(rows * columns, len(bases.base), bases.escapes)
    original, planes_sums = hashlib.sha256(), [hashlib.sha256() for _ in range(3)]
    indices, words = [], []
    for first, last in _row_slices(entry):
        weight = _matrix(source, entry, first, last)
        block = bases.row_block
        base = bases.base if block is None else bases.base[first // block : -(-last // block)]
        planes = encode(weight, block, base=base)
        if not torch.equal(decode(planes).view(torch.int16), weight.view(torch.int16)):
            raise AssertionError(f"{source.path}: {entry.name} does not survive encoding; this is a defect, report it")
        original.update(_raw(weight.view(torch.int16)))
        for digest, offset, data in zip(
            planes_sums,
            (first * columns, at.codes + first * columns // 2),
            (_raw(planes.bytes), _raw(pack_nibbles(planes.codes))),
            strict=False,
        ):
            digest.update(data)
            file.seek(start + offset)
            file.write(data)
        indices.append(planes.escape_index.numpy() + first * columns)
        words.append(planes.escape_word.numpy())
    small = bytearray(at.size - at.base)
    for offset, data in (
        (at.base, bases.base.numpy().astype("<i4").tobytes()),
        (at.index, np.concatenate(indices).astype(f"<u{at.index_bytes}").tobytes()),
        (at.word, np.concatenate(words).astype("<u2").tobytes()),
    ):
        small[offset - at.base : offset - at.base + len(data)] = data
    planes_sums[2].update(small)
    file.seek(start + at.base)
    file.write(small)
    sums = (planes_sums[0].hexdigest(), planes_sums[1].hexdigest(), planes_sums[2].hexdigest())
    return Stored(
        True,
        entry.dtype,
        entry.shape,
        original.hexdigest(),
        at.size,
        "",
        bases.row_block,
        len(bases.base),
        bases.escapes,
        sums,
    )


def _raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


def _copy(source: SafetensorsFile, entry: Entry, file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for piece in source.pieces(entry.offset, entry.size):
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


def _reserve(source: SafetensorsFile) -> int:
    """Bytes to leave for length and header, enough whatever the tensors become; a multiple of ALIGN."""
    long = "f" * 64
    stored, places = {}, []
    for e in source.entries:
        reason = "looked up by row"  # the longest
        stored[e.name] = Stored(
            False, e.dtype, e.shape, long, _WIDEST, reason, _WIDEST, _WIDEST, _WIDEST, (long, long, long)
        )
        places += [Entry(e.name, "U8", (_WIDEST, *e.shape), _WIDEST, _WIDEST)]
    return align_up(8 + len(header_text(metadata_of(source.header, stored), places).encode()) + 2 * len(places) + 16)


def _write_header(file: BinaryIO, metadata: dict[str, str], places: list[Entry], room: int) -> None:
    text = header_text(metadata, places, room).encode()
    if len(text) > room - 8:
        raise AssertionError(
            f"header of {len(text)} bytes outgrew its reserve of {room - 8}; this is a defect, report it"
        )
    file.seek(0)
    file.write((room - 8).to_bytes(8, "little") + text.ljust(room - 8))
