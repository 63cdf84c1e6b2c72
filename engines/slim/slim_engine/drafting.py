"""What a drafter is. dflash.py and ngram.py implement it; the round knows only this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slim_engine.request import Request


@dataclass(slots=True)
class Proposal:
    """Drafts of one request. q [len(tokens), V]: the distributions they were drawn from; None: they are fixed choices."""

    tokens: list[int]
    q: torch.Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens. Wrong proposals cost time and never change what is committed."""

    method: str
    max_drafts: int
    tap_ids: tuple[int, ...]  # target layers whose output `observe` wants

    def start(self, request: Request) -> None:
        """A request begins; its prompt is known and not yet prefilled."""

    def observe(self, request: Request, taps: torch.Tensor | None) -> None:
        """The target ran committed rows of `request`: taps [n, T*H] of these rows, in order (None without tap_ids)."""

    def absorb(self, requests: Sequence[Request]) -> None:
        """Turns what was observed into state now (called after each prefill chunk, to keep it small)."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """At most counts[i] drafts for requests[i], to follow its last committed token."""

    def finish(self, request: Request) -> None:
        """The request ended; its state may be recycled."""
