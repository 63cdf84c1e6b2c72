"""The whole-round model of speculative decoding.

speedup = AL x T_ar / (T_draft + T_verify + T_host), where AL is the accepted length: tokens committed per round,
bonus token included. Source: facts section 0.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def ceiling(accepted_length: float, ar_ms: float, bound_ms: float) -> float:
    """Speedup over a measured autoregressive step if the round ran at its bound."""
    return speedup(accepted_length, ar_ms, RoundTimes(0.0, bound_ms))
