"""One request: its tokens, its caches, and the rules that end it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slim_engine.kv import KVCache
from slim_engine.sampling import SamplingParams
from slim_engine.text import Detokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability at temperature 1, and the most probable tokens there. logprob None: not computed."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class LogprobOptions:
    """start: first prompt position to score (None: outputs only). top: alternatives per position."""

    start: int | None = None
    top: int = 0


@dataclass
class Chunk:
    """What a step adds to a request. finish: SGLang's finish_reason, None while it runs."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish: dict[str, Any] | None


@dataclass(eq=False)
class Request:
    """State of one request. Made by the server, owned by the engine thread from submission to its last chunk."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    emit: Callable[[Chunk], None]
    logprobs: LogprobOptions | None = None
    detokenizer: Detokenizer | None = None  # only where stop strings need text
    output_ids: list[int] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    cancelled: bool = False  # set by the server when the client is gone
    cache: KVCache | None = None
    draft_state: Any = None  # the drafter's own
    prefilled: int = 0
    rounds: int = 0
    committed: int = 0  # by rounds
    created: float = field(default_factory=time.perf_counter)
    _generator: torch.Generator | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.params.max_new_tokens - len(self.output_ids)

    @property
    def last_token(self) -> int:
        """The newest committed token; its keys and values are not in the cache yet."""
        return self.output_ids[-1]

    @property
    def generator(self) -> torch.Generator:
        """The request's own random numbers, so that neighbours do not change its draws."""
        if self._generator is None:
            self._generator = torch.Generator()
            self._generator.manual_seed(
                int.from_bytes(os.urandom(7), "little") if self.params.seed is None else self.params.seed
            )
        return self._generator

    def commit(self, tokens: list[int]) -> list[int]:
        """Appends `tokens` until one of them ends the request; returns those appended.

        Ends at EOS (kept in the output), at a stop token, when a stop string is complete, or at max_new_tokens.
        """
        kept: list[int] = []
        for token in tokens:
            if self.finish is not None:
                break
            kept.append(token)
            self.output_ids.append(token)
            self.finish = self._ended_by(token)
        return kept

    def _ended_by(self, token: int) -> dict[str, Any] | None:
        if token in self.params.stop_token_ids or (not self.params.ignore_eos and token in self.eos_token_ids):
            return {"type": "stop", "matched": token}
        if self.detokenizer is not None:
            matched = self.detokenizer.push_and_find(token, self.params.stop)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        if self.remaining == 0:
            return {"type": "length", "length": self.params.max_new_tokens}
        return None
