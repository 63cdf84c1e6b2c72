"""The whole-round model of speculative decoding.

speedup = AL x T_ar / (T_draft + T_verify + T_host), where AL is the accepted length: tokens committed per round,
bonus token included. Source: facts section 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import CostModelError


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of the parts of a decode round."""

    draft_ms: float
    verify_ms: float
    host_ms: float = 0.0

    @property
    def round_ms(self) -> float:
        """Whole round."""
        return self.draft_ms + self.verify_ms + self.host_ms


def speedup(accepted_length: float, ar_ms: float, times: RoundTimes) -> float:
    """Decode speed over autoregression. `ar_ms` is the time of one autoregressive step."""
    if ar_ms <= 0 or times.round_ms <= 0:
        raise CostModelError(f"speedup needs positive times: ar {ar_ms} ms, round {times.round_ms} ms")
    return accepted_length * ar_ms / times.round_ms


def break_even_length(ar_ms: float, times: RoundTimes) -> float:
    """Accepted length at which speculation neither gains nor loses."""
    if ar_ms <= 0:
        raise CostModelError(f"an autoregressive step must take positive time, got {ar_ms} ms")
    return times.round_ms / ar_ms


def accepted_length(acceptance: Sequence[float]) -> float:
    """Expected accepted length from conditional acceptance by position: 1 + sum of the running products.

    `acceptance[j]` is the probability that draft j+1 is accepted given that all before it were.
    """
    total, survive = 1.0, 1.0
    for position, rate in enumerate(acceptance, start=1):
        if not 0.0 <= rate <= 1.0:
            raise CostModelError(f"acceptance at position {position} must be between 0 and 1, got {rate}")
        survive *= rate
        total += survive
    return total


def acceptance_for(length: float, drafts: int) -> float:
    """The constant acceptance by position at which `drafts` drafts give this expected accepted length (bisection).

    Raises `CostModelError` outside 1..drafts + 1, which no acceptance can give.
    """
    if not 1.0 <= length <= drafts + 1.0:
        raise CostModelError(f"{drafts} drafts give an accepted length between 1 and {drafts + 1}, not {length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_length([middle] * drafts) < length else (low, middle)
    return high


@dataclass(frozen=True)
class VerifyChoice:
    """The best number of drafts to verify, and what it yields."""

    drafts: int
    accepted_length: float
    round_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """Committed tokens per millisecond and request."""
        return self.accepted_length / self.round_ms


def best_drafts(
    acceptance: Sequence[float],
    verify_ms: Callable[[int], float],
    *,
    draft_ms: float | Callable[[int], float] = 0.0,
    host_ms: float = 0.0,
    minimum: int = 0,
) -> VerifyChoice:
    """Choose how many drafts to verify so that committed tokens per time are most.

    `verify_ms(rows)` is the time of a target pass over `rows` = drafts + 1 rows. `draft_ms` is constant for a block
    drafter (one pass drafts the whole block), or a function of the number of drafts. Zero drafts still pay for
    the draft pass unless `draft_ms` is a function that says otherwise. Ties go to fewer drafts.
    """
    if minimum > len(acceptance):
        raise CostModelError(f"at least {minimum} drafts are asked for, acceptance knows {len(acceptance)}")
    choices = []
    for drafts in range(minimum, len(acceptance) + 1):
        drafting = draft_ms(drafts) if callable(draft_ms) else draft_ms
        total = drafting + verify_ms(drafts + 1) + host_ms
        if total <= 0:
            raise CostModelError(f"a round with {drafts} drafts must take positive time, got {total} ms")
        choices.append(VerifyChoice(drafts, accepted_length(acceptance[:drafts]), total))
    return max(choices, key=lambda choice: choice.tokens_per_ms)


def ceiling(accepted_length: float, ar_ms: float, bound_ms: float) -> float:
    """Speedup over a measured autoregressive step if the round ran at its bound."""
    return speedup(accepted_length, ar_ms, RoundTimes(0.0, bound_ms))
