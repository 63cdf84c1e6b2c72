"""The target's output head, for verification, autoregressive steps and scoring."""

from __future__ import annotations

import torch

from slim_engine.linear import Compute, Linear, make_linear
from slim_engine.profiling import mark


class TargetHead:
    """logits = hidden W^T over the whole vocabulary."""

    def __init__(self, weight: torch.Tensor, compute: Compute, pack_rows: int) -> None:
        self.linear: Linear = make_linear(weight, "lm_head", compute, pack_rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] after the final norm -> [M, V] float32."""
        mark("target.head")
        out = self.linear(hidden).float()
        mark(None)
        return out

    def argmax(self, hidden: torch.Tensor) -> list[int]:
        """Greedy token per row; among equal logits the first index wins."""
        logits = self.logits(hidden)
        mark("sample")
        out = argmax_rows(logits)
        mark(None)
        return out


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """First index of the maximum of each row of [M, V]. numpy's kernel is vectorised where torch's is not, and its tie rule is documented."""
    out: list[int] = logits.numpy().argmax(-1).tolist()
    return out
