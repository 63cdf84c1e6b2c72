"""Write BF16 tensors as a safetensors file with numpy alone.

The bytes are a function of the tensors only (names sorted, no timestamps), so a digest of the file can be
pinned. This file may not import torch or the safetensors package.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]


def round_to_bf16(values: Float32Array) -> NDArray[np.uint16]:
    """Round float32 to the nearest BF16, ties to even; returns the raw 16-bit patterns.

    BF16 is the upper half of a float32, so adding 0x7FFF plus the lowest kept bit carries exactly when the
    dropped half is above one half, or equal to it with an odd kept bit. Raises ValueError on NaN or infinity,
    which this addition would turn into something else.
    """
    if not np.isfinite(values).all():
        raise ValueError("values contain NaN or infinity")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(shapes):
        end = offset + 2 * int(np.prod(shapes[name], dtype=np.int64))
        entries[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_bf16_safetensors(
    path: Path, tensors: Mapping[str, Float32Array], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Write `tensors` (float32, any shape) to `path` as BF16.

    Values are read one at a time, sorted by name, so a lazy mapping keeps memory at one tensor; give `shapes` to spare
    it the extra read that asks for them. Raises ValueError naming the tensor on NaN, infinity or a wrong shape.
    """
    if shapes is None:
        shapes = {name: tuple(tensors[name].shape) for name in tensors}
    header = _header(shapes)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)))
        stream.write(header)
        for name, patterns in _patterns(tensors, shapes):
            _write(stream, name, patterns)


def _patterns(
    tensors: Mapping[str, Float32Array], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    for name in sorted(shapes):
        values = tensors[name]
        if values.shape != shapes[name]:
            raise ValueError(f"tensor {name}: shape {values.shape}, announced as {shapes[name]}")
        try:
            yield name, round_to_bf16(values)
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error


def _write(stream: BinaryIO, name: str, patterns: NDArray[np.uint16]) -> None:
    data = patterns.astype("<u2", copy=False).tobytes()
    if stream.write(data) != len(data):
        raise OSError(f"short write at tensor {name}: is the disk full?")
