"""Binomial and chi-square tails used by the gate. Pure arithmetic; no data of ours."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.special import bdtrc, betaincinv, chdtrc


def binomial_upper(successes: int, trials: int, confidence: float) -> float:
    """One-sided Clopper-Pearson upper bound of a share, from `successes` out of `trials`.

    Source: Clopper and Pearson 1934; the bound is the `confidence` quantile of Beta(k+1, n-k). With no trials
    nothing is known and the bound is 1. Raises ValueError for impossible counts.
    """
    if trials < 0 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes out of {trials} trials cannot be")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie inside (0, 1), got {confidence}")
    if trials == 0 or successes == trials:
        return 1.0
    return float(betaincinv(successes + 1, trials - successes, confidence))


def binomial_tail(successes: int, trials: int, share: float) -> float:
    """Probability of `successes` or more out of `trials` at true share `share`."""
    if successes <= 0:
        return 1.0
    if successes > trials:
        return 0.0
    return float(bdtrc(successes - 1, trials, share))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability of a chi-square variable with `degrees` degrees of freedom at or above `statistic`."""
    return float(chdtrc(degrees, statistic))


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value with at least `share` of the values at or below it; 0.0 for no values (no gap was seen)."""
    if not values:
        return 0.0
    ordered = sorted(values)
    index = -(-len(ordered) * share // 1)
    return ordered[min(max(int(index) - 1, 0), len(ordered) - 1)]
