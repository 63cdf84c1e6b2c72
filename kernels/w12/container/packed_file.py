"""Reading one packed safetensors file: planes for an engine, original bytes for `unpack`, every damage refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadCheckpoint
from ..format import MAX_BASE, Planes, decode
from .blob import Sections, read_metadata, rows_per_slice, unpack_nibbles
from .safetensors_file import SafetensorsFile


class PackedFile(SafetensorsFile):
    """An open packed file. `stored` is in the order of the original data."""

    def __init__(self, path: Path) -> None:
        """Raises BadCheckpoint for a damaged file, another version, or one that is not packed."""
        super().__init__(path)
        try:
            self.original_header, self.stored = read_metadata(path, self.metadata)
            self._places = {entry.name: entry for entry in self.entries}
            self._check_places()
        except BaseException:
            self._file.close()
            raise

    def planes(self, name: str) -> Planes:
        """A packed matrix, whole. Raises KeyError for a tensor that is not packed, BadCheckpoint for a damaged one."""
        kept = self.stored[name]
        if not kept.packed:
            raise KeyError(f"{self.path}: tensor {name} is not packed ({kept.reason}): read it as safetensors")
        planes, raw = next(self._slices(name, kept.shape[0]))
        self._check_sums(name, [hashlib.sha256(data) for data in raw])
        return planes

    def tensor_bytes(self, name: str) -> Iterator[bytes | bytearray]:
        """The original bytes of a tensor in pieces. Raises BadCheckpoint if anything does not match its sum."""
        kept, place = self.stored[name], self._places[name]
        digest = hashlib.sha256()
        if kept.packed:
            pieces: Iterator[bytes | bytearray] = self._decoded(name)
        else:
            pieces = self.pieces(place.offset, place.size)
        for piece in pieces:
            digest.update(piece)
            yield piece
        if digest.hexdigest() != kept.sha256:
            raise self.damaged(name, "it does not match its checksum")

    def damaged(self, name: str, what: str) -> BadCheckpoint:
        """The error for a tensor that cannot be trusted."""
        return BadCheckpoint(
            f"{self.path}: tensor {name} is damaged: {what}",
            "pack the original checkpoint again, or copy this file again.",
        )

    def _check_places(self) -> None:
        if set(self._places) != set(self.stored):
            raise BadCheckpoint(f"{self.path}: its tensors are not those that its metadata describe", "pack it again.")
        for name, kept in self.stored.items():
            place = self._places[name]
            expected = kept.stored_bytes
            if kept.packed:
                expected = Sections.of(kept.weights, kept.bases, kept.escapes).size
            wanted = ("U8", (expected,)) if kept.packed else (kept.dtype, kept.shape)
            if expected != place.size or wanted != (place.dtype, place.shape):
                raise self.damaged(name, f"it has {place.size} bytes of {place.dtype}, its metadata say {expected}")

    def _decoded(self, name: str) -> Iterator[bytes]:
        sums = [hashlib.sha256(), hashlib.sha256()]
        for planes, raw in self._slices(name, rows_per_slice(self.stored[name].shape)):
            for digest, data in zip(sums, raw, strict=True):
                digest.update(data)
            yield decode(planes).view(torch.int16).numpy().tobytes()
        self._check_sums(name, sums)

    def _check_sums(self, name: str, sums: list[Any]) -> None:
        """Of the bytes and of the codes."""
        for digest, expected in zip(sums, self.stored[name].planes_sha256, strict=False):
            if digest.hexdigest() != expected:
                raise self.damaged(name, "its planes do not match their checksums")

    def _slices(self, name: str, step: int) -> Iterator[tuple[Planes, tuple[bytearray, bytearray]]]:
        """Rows in slices of `step` (a multiple of every row block), each with the raw bytes and codes it came from."""
        kept, start = self.stored[name], self._places[name].offset
        rows, columns = kept.shape
        base, index, word = self._small_sections(name)
        codes_at = start + Sections.of(kept.weights, kept.bases, kept.escapes).codes
        for first in range(0, rows, step):
            last = min(rows, first + step)
            begin, count = first * columns, (last - first) * columns
            raw_bytes = self.read(start + begin, count)
            raw_codes = self.read(codes_at + begin // 2, (count + 1) // 2)
            inside = slice(*np.searchsorted(index, [begin, begin + count]).tolist())
            codes = unpack_nibbles(torch.frombuffer(raw_codes, dtype=torch.uint8), count).view(last - first, columns)
            found = codes.view(-1).numpy() == 0
            if int(found.sum()) != inside.stop - inside.start or not found[index[inside] - begin].all():
                raise self.damaged(name, "its escapes are not where its codes say")
            block = kept.row_block
            yield (
                Planes(
                    bytes=torch.frombuffer(raw_bytes, dtype=torch.uint8).view(last - first, columns),
                    codes=codes,
                    base=base if block is None else base[first // block : -(-last // block)],
                    row_block=block,
                    escape_index=torch.from_numpy(index[inside] - begin),
                    escape_word=torch.from_numpy(word[inside].copy()),
                    shape=(last - first, columns),
                ),
                (raw_bytes, raw_codes),
            )

    def _small_sections(self, name: str) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Bases (int32), escape indices (int64) and words (uint16), checked."""
        kept, start = self.stored[name], self._places[name].offset
        at = Sections.of(kept.weights, kept.bases, kept.escapes)
        raw = self.read(start + at.base, at.size - at.base)
        if hashlib.sha256(raw).hexdigest() != kept.planes_sha256[2]:
            raise self.damaged(name, "its bases and escapes do not match their checksum")
        base = np.frombuffer(raw, "<i4", kept.bases)
        index = np.frombuffer(raw, f"<u{at.index_bytes}", kept.escapes, at.index - at.base).astype(np.int64)
        word = np.frombuffer(raw, "<u2", kept.escapes, at.word - at.base)
        if (base < 0).any() or (base > MAX_BASE).any():
            raise self.damaged(name, f"a base lies outside 0..{MAX_BASE}")
        if (np.diff(index) <= 0).any() or (len(index) and not 0 <= index[0] <= index[-1] < kept.weights):
            raise self.damaged(name, "its escapes are not in order")
        return torch.from_numpy(base.astype(np.int32)), index, word
