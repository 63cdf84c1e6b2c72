"""Statistics of paired comparisons that may be looked at after every pair.

Observations are log-ratios x_k = log(candidate rate / base rate), one per pair. Machine speed drifts slowly and by
large factors; pairing on one prompt and alternating the order (ABBA) cancels it to first order, so the x_k are
close to independent, with an unknown variance that differs from candidate to candidate.

Interval: the Gaussian-mixture t confidence sequence (Wang and Ramdas 2023, "Anytime-valid t-tests and confidence
sequences for Gaussian means with unknown variance", arXiv 2310.03722, after Lai 1976). With V = sum (x-m)^2 and
S = sum (x-m), the mixture over the effect size mean/sd ~ N(0, 1/c2) and the right Haar mixture over sd give

    E_n(m) = sqrt(c2 / (n + c2)) * (V / (V - S^2 / (n + c2)))^(n/2),

a test martingale of the scale-invariant filtration under Gaussian x with mean m and any sd: by Ville's inequality
P(exists n: E_n(mean) >= 1/alpha) <= alpha. The set {m: E_n(m) < 1/alpha} is an interval in closed form. It is
exact at every n, also n = 3, which rules out the asymptotic sequences at our 4 to 40 pairs; unlike an empirical
Bernstein sequence it needs no bound on x. Coverage under heavy tails and drift is checked by simulation in the tests.

Pure arithmetic: no clock, no engine, no randomness. Standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from specpilot.contracts import Record

C2 = 0.1
"""Precision of the mixture over mean/sd. Small: tuned for effects of several standard deviations, which a few pairs
must show (a gain of 1.3 at 5 % noise is five). At effects near one sd it costs about a tenth in width."""

LEVEL_DECAY = 1.5
_ZETA = 2.612375348685488
"""Riemann zeta(1.5): sum of k^-1.5, normalises the levels."""


class Interval(Record):
    """Mean of log-ratios with bounds that hold at every stopping time; infinite while too few pairs are in."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def low_ratio(self) -> float:
        """Lower bound as a ratio; 0 while the interval is open."""
        return math.exp(self.low)

    @property
    def high_ratio(self) -> float:
        """Upper bound as a ratio; infinite while the interval is open."""
        return math.exp(self.high) if self.high < 700 else math.inf


def confidence_sequence(x: Sequence[float], alpha: float, c2: float = C2) -> Interval:
    """Interval for the mean of `x` at level `alpha`, valid however often it is looked at. See the module's text.

    Raises ValueError on an empty or non-finite sample and on alpha outside (0, 1).
    """
    _check(x, alpha)
    n, mean = len(x), statistics.fmean(x)
    radius = _radius_in_sd(n, alpha, c2) * _sd0(x, mean)
    return Interval(mean=mean, low=mean - radius, high=mean + radius, n=n)


def level_of(x: Sequence[float], radius: float, c2: float = C2) -> float | None:
    """The level whose interval for the mean of `x` has this half-width; None if none in (1e-12, 0.5) has.

    The inverse of `confidence_sequence`: tells whether a stored interval can come from stored samples.
    """
    _check(x, 0.5)
    wanted = radius / _sd0(x, statistics.fmean(x))
    low, high = 1e-12, 0.5
    if not _radius_in_sd(len(x), high, c2) * (1 - 1e-9) <= wanted <= _radius_in_sd(len(x), low, c2):
        return None
    for _ in range(100):  # the half-width falls as the level rises
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _radius_in_sd(len(x), middle, c2) > wanted else (low, middle)
    return high


def _check(x: Sequence[float], alpha: float) -> None:
    if len(x) == 0 or not all(math.isfinite(value) for value in x):
        raise ValueError("needs at least one finite log-ratio, and no others")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must lie in (0, 1), got {alpha}")


def _sd0(x: Sequence[float], mean: float) -> float:
    """Standard deviation with divisor n, floored: identical ratios are a clock's resolution, not certainty."""
    return max(1e-4, math.sqrt(sum((value - mean) ** 2 for value in x) / len(x)))


def _radius_in_sd(n: int, alpha: float, c2: float) -> float:
    """Half-width over the divisor-n standard deviation; infinite while no interval exists.

    E_n(m) < 1/alpha with d = (mean - m)^2, s2 = divisor-n variance: (s2 + d) / (s2 + d q) < r, q = c2/(n+c2),
    r = ((n + c2) / (c2 alpha^2))^(1/n), that is d < s2 (r - 1) / (1 - r q) where the denominator is positive.
    """
    q = c2 / (n + c2)
    r = (1.0 / (q * alpha * alpha)) ** (1.0 / n)
    return math.sqrt((r - 1.0) / (1.0 - r * q)) if r * q < 1.0 else math.inf


def detectable_effect(sd: float, pairs: int, alpha: float, power: float = 0.8) -> float:
    """Smallest ratio (above 1) that `pairs` pairs show as different from 1 with probability about `power`.

    `sd` is the standard deviation of one pair's log-ratio, from an A/A run. Half-width expected at the last pair
    plus the normal quantile of the mean's own scatter. Infinite when that many pairs give no interval.
    """
    if sd < 0 or pairs < 2:
        raise ValueError("needs sd of at least 0 and at least two pairs")
    spread = sd * math.sqrt((pairs - 1) / pairs)
    quantile = statistics.NormalDist().inv_cdf(power)
    effect = _radius_in_sd(pairs, alpha, C2) * spread + quantile * sd / math.sqrt(pairs)
    return math.exp(effect) if effect < 700 else math.inf


def pairs_needed(sd: float, ratio: float, alpha: float, most: int = 1000) -> int | None:
    """Fewest pairs whose `detectable_effect` is at most `ratio`; None beyond `most`."""
    for pairs in range(2, most + 1):
        if detectable_effect(sd, pairs, alpha) <= ratio:
            return pairs
    return None


def level_for(index: int, discoveries: int, alpha: float) -> float:
    """Level of comparison number `index` (from 1, all comparisons of the run) after `discoveries` gains were declared.

    e-LOND (Xu and Ramdas 2024, "Online multiple testing with e-values", AISTATS 2024): declaring a gain when
    E >= 1/level with level_t = alpha gamma_t (discoveries before t + 1), sum gamma_t = 1, bounds the expected share of
    false gains by alpha under any dependence, so candidates may be chosen in the light of earlier results. It
    applies here because E_n(0) on the event "mean above 0" is at most E_n(true mean) whenever the true mean is at most
    0, hence an e-value for "no gain". gamma_t = t^-1.5 / zeta(1.5): at the tenth comparison 1.2 % of alpha per
    discovery so far, where 6/(pi t)^2 without reward leaves 0.6 % for ever.
    """
    if index < 1 or discoveries < 0 or discoveries >= index:
        raise ValueError(f"index counts from 1 and is above discoveries, got {index} and {discoveries}")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must lie in (0, 1), got {alpha}")
    return min(0.5, alpha * index**-LEVEL_DECAY / _ZETA * (discoveries + 1))


def sample_sd(x: Sequence[float]) -> float:
    """Standard deviation of log-ratios with divisor n - 1; 0 for fewer than two."""
    return statistics.stdev(x) if len(x) > 1 else 0.0
