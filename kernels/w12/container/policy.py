"""Which tensors of a checkpoint are worth twelve bits, and with how many bases.

A decode step gains only from weights that it streams whole: BF16 matrices. It reads one row of an embedding table and a
few of a candidate codebook, so those stay as they are, unless the table is the head as well (tied embeddings). Norms,
biases and small matrices cost nothing to read. A matrix with more than 0.2 % escapes stays too: each escape is a patch in
the kernel, and twelve bits are then no longer what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..format import choose_base, count_escapes

RowBlock = Literal["auto", "none", "64", "128"]
MIN_WEIGHTS = 1 << 16  # below 128 KiB a launch costs more than the bytes
MAX_ESCAPE_RATE = 0.002
COUNTED_ROWS = 64  # exponents are counted for blocks of so many rows; the other choices are sums of these
_TABLES = ("embed_tokens", "embedding", "embeddings", "embed", "wte", "wpe", "tok_embeddings", "word_embeddings")
_CODEBOOKS = ("predecessor_codebook", "successor_codebook")


@dataclass(frozen=True)
class Bases:
    """How a matrix is to be encoded."""

    row_block: int | None
    base: Tensor
    """int32, one per block."""
    escapes: int


def reason_to_keep(name: str, dtype: str, shape: tuple[int, ...], table_is_head: bool) -> str:
    """Why a tensor stays as it is, judged by its header entry alone; empty if it may be packed."""
    if dtype != "BF16":
        return "not BF16"
    if len(shape) != 2:
        return "not a matrix"
    parts = name.removesuffix(".weight").split(".")
    if parts[-1] in _CODEBOOKS or (parts[-1] in _TABLES and not table_is_head):
        return "looked up by row"
    if shape[0] * shape[1] < MIN_WEIGHTS:
        return "small"
    return ""


def embeds_the_head(names: Iterable[str], config: dict[str, Any]) -> bool:
    """True if the embedding table is also the head: config.json says so, or the checkpoint holds no head."""
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings") or (isinstance(text, dict) and text.get("tie_word_embeddings"))
    return bool(tied) or not any("lm_head" in name.split(".") for name in names)


def choose(counts: Tensor, wanted: RowBlock = "auto", max_escape_rate: float = MAX_ESCAPE_RATE) -> Bases:
    """Bases for a matrix whose exponents are `counts` (int64 [ceil(N / 64), 256], blocks of 64 rows).

    `auto` takes one base for the tensor, which a kernel keeps in a register, unless bases of 64 rows more than halve the
    escapes (padding rows, rows of very different scale) or alone stay below `max_escape_rate`.
    """
    one = Bases(None, choose_base(counts.sum(0, keepdim=True)), count_escapes(counts.sum(0, keepdim=True)))
    if wanted == "none":
        return one
    if wanted == "128":
        even = torch.nn.functional.pad(counts, (0, 0, 0, len(counts) % 2))
        pairs = even.view(-1, 2, 256).sum(1)
        return Bases(128, choose_base(pairs), count_escapes(pairs))
    blocks = Bases(COUNTED_ROWS, choose_base(counts), count_escapes(counts))
    limit = max_escape_rate * int(counts.sum())
    better = 2 * blocks.escapes < one.escapes or blocks.escapes <= limit < one.escapes
    return blocks if wanted == "64" or better else one
