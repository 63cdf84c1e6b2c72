"""What a packed file looks like: the blob of a matrix, and the metadata that say how to read it.

A packed file is itself safetensors. A packed matrix keeps its name and becomes one U8 tensor, a *blob* of five sections,
each from a multiple of 64 bytes on, zeros between:

    bytes         uint8  [N * K]
    codes         uint8  [ceil(N * K / 2)]   code of flat index i in the low (i even) or high half of byte i // 2
    base          int32  [bases]
    escape_index  uint32 [E]                 uint64 if the matrix has more than 2^32 weights
    escape_word   uint16 [E]

Blobs come first, so that each begins at a multiple of 64; tensors that stay as they were follow, widest type first. The
metadata entry `w12` is JSON: version, the original header word for word (with it the original file is rebuilt byte for
byte, whoever wrote it), and per tensor what is needed to read it and SHA-256 sums of what it was and of what is stored.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadCheckpoint
from ..format import CHUNK_WEIGHTS, VERSION, blocks_of
from .safetensors_file import parse, whole_numbers

KEY = "w12"
ALIGN = 64
ROW_BLOCKS = (None, 64, 128)  # each divides the rows of a slice


@dataclass(frozen=True)
class Stored:
    """How one tensor is stored. The sums are hexadecimal SHA-256."""

    packed: bool
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    """Of the original bytes."""
    stored_bytes: int
    reason: str = ""
    """Why it is not packed."""
    row_block: int | None = None
    bases: int = 0
    escapes: int = 0
    planes_sha256: tuple[str, str, str] = ("", "", "")
    """Of the bytes section, of the codes section, of the rest of the blob."""

    @property
    def weights(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per element, padding included."""
        return 8 * self.stored_bytes / max(1, self.weights)


@dataclass(frozen=True)
class Sections:
    """Byte offsets of a blob's sections from its start, and its size."""

    codes: int
    base: int
    index: int
    word: int
    size: int
    index_bytes: int

    @staticmethod
    def of(weights: int, bases: int, escapes: int) -> Sections:
        """Where everything lies, from the counts alone."""
        index_bytes = 4 if weights <= 1 << 32 else 8
        codes = align_up(weights)
        base = codes + align_up((weights + 1) // 2)
        index = base + align_up(4 * bases)
        word = index + align_up(index_bytes * escapes)
        return Sections(codes, base, index, word, word + align_up(2 * escapes), index_bytes)


def rows_per_slice(shape: tuple[int, ...]) -> int:
    """Rows of a slice: a multiple of every row block (and so an even number of codes), about CHUNK_WEIGHTS weights."""
    return max(1, CHUNK_WEIGHTS // (128 * max(1, shape[1]))) * 128


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 0..15, any shape -> uint8 [ceil(n / 2)]: even flat index low, odd high, a missing last one 0."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, codes.numel() % 2))
    return flat[0::2] | (flat[1::2] << 4)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """The inverse: uint8 [count]."""
    return torch.stack([packed & 15, packed >> 4], dim=1).view(-1)[:count]


def align_up(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def metadata_of(header: str, stored: dict[str, Stored]) -> dict[str, str]:
    """The metadata of a packed file, from the original header and what became of each tensor."""
    value: dict[str, Any] = {"version": VERSION, "header": header}
    value["tensors"] = {name: asdict(kept) for name, kept in stored.items()}
    text = json.dumps(value, separators=(",", ":"))
    return {KEY: text, f"{KEY}_sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_metadata(path: Path, metadata: dict[str, str]) -> tuple[str, dict[str, Stored]]:
    """The inverse; `path` is for messages. Raises BadCheckpoint for another version or damage."""
    text = metadata.get(KEY)
    if text is None:
        raise BadCheckpoint(
            f"{path} is not a packed file: it has no {KEY} metadata", "give a folder that `pack` wrote."
        )
    try:
        value = parse(text)
        version = value["version"]
        if version != VERSION:
            raise BadCheckpoint(
                f"{path} has format version {version}, this program reads {VERSION}",
                "use the version of SpecPilot that packed it, or pack the original checkpoint again.",
            )
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get(f"{KEY}_sha256"):
            raise BadCheckpoint(
                f"{path}: its metadata do not match their checksum", "pack the original checkpoint again."
            )
        stored = {name: _stored(kept) for name, kept in value["tensors"].items()}
        header = str(value["header"])
        header.encode()  # a lone surrogate is a ValueError
        return header, stored
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: its {KEY} metadata are malformed ({error!r})", "pack it again.") from error


def _stored(value: dict[str, Any]) -> Stored:
    """Raises for counts that no writer of ours gives: the sum of the metadata is no signature, and sizes follow from them."""
    value = {**value, "shape": whole_numbers(value["shape"]), "planes_sha256": tuple(value["planes_sha256"])}
    kept = Stored(**value)
    whole_numbers([kept.stored_bytes, kept.bases, kept.escapes])
    if len(kept.planes_sha256) != 3:
        raise ValueError("three checksums of planes are needed")
    if kept.packed:
        rows, columns = kept.shape
        if kept.dtype != "BF16" or min(rows, columns) < 1 or kept.row_block not in ROW_BLOCKS:
            raise ValueError(f"{kept.dtype} {list(kept.shape)} cannot be packed with bases of {kept.row_block} rows")
        if kept.bases != blocks_of(rows, kept.row_block) or kept.escapes > kept.weights:
            raise ValueError(f"{kept.bases} bases and {kept.escapes} escapes do not go with {list(kept.shape)}")
    return kept
