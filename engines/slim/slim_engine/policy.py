"""How many drafts are made and how many of them are verified. Stock: the whole block, as published, or the tunable's first few."""

from __future__ import annotations

from collections.abc import Sequence

from slim_engine.drafting import Proposal
from slim_engine.request import Request


class Policy:
    """Asked twice a round: before drafting, and again when the drafts are known."""

    def __init__(self, max_drafts: int, verify_drafts: int) -> None:
        self._limit = min(max_drafts, verify_drafts)

    def draft_counts(self, requests: Sequence[Request]) -> list[int]:
        """Drafts wanted per request: never more than it may still commit besides the bonus token."""
        return [max(0, min(self._limit, r.remaining - 1)) for r in requests]

    def verify_counts(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        """Leading drafts of each proposal that the target is asked about."""
        return [len(p.tokens) for p in proposals]

    def observe(self, request: Request, verified: int, accepted: int) -> None:
        """Outcome of a round, for policies that adapt."""
