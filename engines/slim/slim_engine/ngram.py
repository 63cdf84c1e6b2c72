"""Prompt look-up: the tokens that followed the last earlier occurrence of the current suffix are the drafts. No model, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slim_engine.drafting import Proposal
from slim_engine.request import Request


@dataclass(slots=True)
class NgramState:
    """tokens: prompt and output. seen: n-gram -> index after its last occurrence, for n-grams that end before the last token."""

    tokens: list[int]
    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    outputs: int = 0


class NgramDrafter:
    """See drafting.Drafter. Longest suffix first, from `longest` down to `shortest` tokens."""

    method = "ngram"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, shortest: int, longest: int, max_drafts: int) -> None:
        self._shortest = shortest
        self._longest = max(shortest, longest)
        self.max_drafts = max_drafts

    def start(self, request: Request) -> None:
        request.draft_state = NgramState(list(request.prompt_ids))

    def finish(self, request: Request) -> None:
        request.draft_state = None

    def observe(self, request: Request, taps: torch.Tensor | None) -> None:
        pass

    def absorb(self, requests: Sequence[Request]) -> None:
        pass

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        return [Proposal(self._look_up(r, n)) for r, n in zip(requests, counts, strict=True)]

    def _look_up(self, request: Request, count: int) -> list[int]:
        state: NgramState = request.draft_state
        state.tokens.extend(request.output_ids[state.outputs :])
        state.outputs = len(request.output_ids)
        self._index(state)
        if count <= 0:
            return []
        for n in range(min(self._longest, len(state.tokens)), self._shortest - 1, -1):
            at = state.seen.get(tuple(state.tokens[-n:]))
            if at is not None:
                return state.tokens[at : at + count]
        return []

    def _index(self, state: NgramState) -> None:
        last = len(state.tokens) - 1  # the suffix itself must not find itself
        for end in range(state.indexed + 1, last + 1):
            for n in range(self._shortest, min(self._longest, end) + 1):
                state.seen[tuple(state.tokens[end - n : end])] = end
        state.indexed = max(state.indexed, last)
