"""The safetensors container, read and written by position: header as it is in the file, data in pieces.

Packing must give back a file byte for byte, whoever wrote it, and must never hold a tensor of gigabytes; the official
library offers neither. Format: eight bytes little-endian header length, JSON header (may end in spaces), then the data,
which the tensors cover without gap or overlap. Files of other writers are checked as strictly as the official reader does,
except that a type it does not know is carried along: its bytes are copied, whatever they mean.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import BadCheckpoint

MAX_HEADER = 100_000_000  # the official reader's limit
PIECE = 16 << 20  # bytes of a piece when data is copied or hashed
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor: where its bytes lie, from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile:
    """An open file. `header` is its text without the length, `entries` are in the order of the data."""

    def __init__(self, path: Path) -> None:
        """Raises BadCheckpoint for anything that is not a whole, well-formed file."""
        self.path = path
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
                raise self._bad("it is no regular file")
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.header, raw = self._read_header()
            self.metadata: dict[str, str] = _metadata(path, raw)
            self.entries = self._read_entries(raw)
        except BaseException:
            self._file.close()
            raise

    @property
    def header_sha256(self) -> str:
        """Hexadecimal digest of the header: of a packed file, it holds the digests of all planes."""
        return hashlib.sha256(self.header.encode()).hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, offset: int, size: int) -> bytearray:
        """Exactly `size` bytes at `offset`. Raises BadCheckpoint where the file ends before."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = os.preadv(self._file.fileno(), [view], offset)
            if got == 0:
                raise self._bad(f"it ends at byte {offset}, in the middle of its data")
            offset += got
            view = view[got:]
        return data

    def pieces(self, offset: int, size: int, piece: int = PIECE) -> Iterator[bytearray]:
        """The range in pieces of at most `piece` bytes."""
        for at in range(offset, offset + size, piece):
            yield self.read(at, min(piece, offset + size - at))

    def _read_header(self) -> tuple[str, dict[str, Any]]:
        if self.size < 8:
            raise self._bad("it is shorter than eight bytes")
        length = int.from_bytes(self.read(0, 8), "little")
        if length > min(MAX_HEADER, self.size - 8):
            raise self._bad(f"its header claims {length} bytes, the file has {self.size}")
        try:
            text = self.read(8, length).decode()
            raw = parse(text, object_pairs_hook=_no_repeats)
        except ValueError as error:
            raise self._bad(f"its header is not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise self._bad("its header is not a JSON object")
        return text, raw

    def _read_entries(self, raw: dict[str, Any]) -> list[Entry]:
        start = 8 + len(self.header.encode())
        entries = []
        for name, value in raw.items():
            if name == "__metadata__":
                continue
            try:
                entry = _entry(name, value, start)
            except (TypeError, KeyError, ValueError) as error:
                raise self._bad(f"the header's entry of {name!r} is malformed") from error
            item = ITEM_BYTES.get(entry.dtype)
            if entry.size < 0 or (item and prod(entry.shape) * item != entry.size):
                raise self._bad(f"{name!r} has shape {list(entry.shape)} {entry.dtype} but {entry.size} bytes")
            entries.append(entry)
        entries.sort(key=lambda e: (e.offset, e.size))
        end = start
        for entry in entries:
            if entry.offset != end:
                raise self._bad(f"{entry.name} begins at byte {entry.offset}, the data before it ends at {end}")
            end += entry.size
        if end != self.size:
            raise self._bad(f"its tensors end at byte {end}, the file at {self.size}")
        return entries

    def _bad(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path} is not a usable safetensors file: {what}", "fetch or pack it again.")


def parse(text: str, **options: Any) -> Any:
    """`json.loads`, for text that others wrote: whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def whole_numbers(values: Any) -> tuple[int, ...]:
    """A JSON list of numbers that fit 64 bits, as a tuple. Raises TypeError or ValueError for anything else."""
    if not isinstance(values, list) or any(type(v) is not int for v in values):  # True is an int, but no size
        raise TypeError(f"{values!r} is not a list of whole numbers")
    if not all(0 <= v < 1 << 64 for v in values):
        raise ValueError(f"{values!r} has a number outside 64 bits")
    return tuple(values)


def _entry(name: str, value: dict[str, Any], start: int) -> Entry:
    name.encode()  # a lone surrogate is a ValueError
    first, last = whole_numbers(value["data_offsets"])
    if not isinstance(value["dtype"], str):
        raise TypeError("the type is no text")
    return Entry(name, value["dtype"], whole_numbers(value["shape"]), start + first, last - first)


def header_text(metadata: dict[str, str], entries: list[Entry], start: int = 0) -> str:
    """The header of a file whose data begin at byte `start` of the coordinates that `entries` use."""
    value: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for e in entries:
        first = e.offset - start
        value[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [first, first + e.size]}
    return json.dumps(value, separators=(",", ":"))


def _metadata(path: Path, raw: dict[str, Any]) -> dict[str, str]:
    found = raw.get("__metadata__")
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise BadCheckpoint(f"{path} is not a usable safetensors file: its metadata are not strings", "fetch it again.")
    return found


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found
