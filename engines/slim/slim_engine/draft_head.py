"""From the drafter's hidden states to draft tokens. Stock: the target's own full head, as published. A mechanism may replace it: whatever
it proposes, verification alone decides what is committed."""

from __future__ import annotations

import torch

from slim_engine.head import argmax_rows
from slim_engine.linear import Linear
from slim_engine.profiling import mark


class DraftHead:
    """logits = softcap(multiplier * hidden W^T). softcap(x) = c * tanh(x / c)."""

    def __init__(self, linear: Linear, multiplier: float = 1.0, softcap: float | None = None) -> None:
        self._linear = linear
        self._multiplier = multiplier
        self._softcap = softcap

    def tokens(self, hidden: torch.Tensor) -> list[int]:
        """Greedy draft per row of hidden [M, H]. Multiplier and softcap are increasing, so the raw logits decide."""
        mark("draft.head")
        out = argmax_rows(self._linear(hidden).float())
        mark(None)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, V] float32, for sampled drafts. -inf marks a token that is never drafted."""
        mark("draft.head")
        out = self._linear(hidden).float() * self._multiplier
        if self._softcap is not None:
            out = torch.tanh(out / self._softcap) * self._softcap
        mark(None)
        return out
