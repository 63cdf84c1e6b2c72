"""A rate above the roofline bound was not measured, it was faked or miscounted."""

from __future__ import annotations

import math

SLACK = 0.05
"""Share by which a measured bound may be too low: bandwidth probes scatter by a few per cent."""


def is_impossible(rate: float, bound: float, slack: float = SLACK) -> bool:
    """True when `rate` (tokens per second) exceeds `bound` by more than `slack`, or is no rate at all.

    `bound` is the cost model's tokens per second at the roof. Raises ValueError on a bound that is not positive:
    an unknown bound must not pass silently as "possible".
    """
    if not bound > 0.0:
        raise ValueError(f"bound must be positive, got {bound}")
    return not math.isfinite(rate) or rate <= 0.0 or rate > bound * (1.0 + slack)
