"""The interval holds its level while being looked at after every pair, on the kinds of noise a machine makes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.evaluation.stats import (
    C2,
    _radius_in_sd,
    confidence_sequence,
    detectable_effect,
    level_for,
    level_of,
    pairs_needed,
    sample_sd,
)

REPETITIONS, PAIRS = 2500, 40


def ever_missed(x: np.ndarray, mean: float, alpha: float) -> float:
    """Share of rows whose interval excluded the true mean at any of 2..n pairs."""
    n = np.arange(1, x.shape[1] + 1)
    average = np.cumsum(x, axis=1) / n
    sd = np.sqrt(np.maximum(np.cumsum(x * x, axis=1) / n - average**2, 0.0))
    radius = np.array([min(1e9, _radius_in_sd(int(k), alpha, C2)) for k in n])
    missed = np.abs(average - mean) > radius * np.maximum(sd, 1e-12)
    return float(missed[:, 1:].any(axis=1).mean())


def abba(rng: np.random.Generator, correlation: float, drift_sd: float, noise_sd: float) -> np.ndarray:
    """Log-ratios of an A/A comparison in ABBA order on a machine whose log-speed is AR(1)."""
    legs = 2 * PAIRS
    drift = np.empty((REPETITIONS, legs))
    drift[:, 0] = rng.normal(size=REPETITIONS) * drift_sd
    for t in range(1, legs):
        step = rng.normal(size=REPETITIONS) * drift_sd * math.sqrt(1 - correlation**2)
        drift[:, t] = correlation * drift[:, t - 1] + step
    speed = drift + rng.normal(size=drift.shape) * noise_sd
    sign = np.where(np.arange(PAIRS) % 2 == 0, 1, -1)
    return (speed[:, 1::2] - speed[:, 0::2]) * sign


NOISES = {
    "gaussian": lambda rng: rng.normal(size=(REPETITIONS, PAIRS)) * 0.05,
    "student-3": lambda rng: rng.standard_t(3, size=(REPETITIONS, PAIRS)) * 0.03,
    "laplace": lambda rng: rng.laplace(size=(REPETITIONS, PAIRS)) * 0.03,
    "hiccups": lambda rng: (
        rng.normal(size=(REPETITIONS, PAIRS)) * 0.03
        + (rng.random((REPETITIONS, PAIRS)) < 0.1) * rng.choice([-0.5, 0.5], (REPETITIONS, PAIRS))
    ),
    "drift-0.3": lambda rng: abba(rng, 0.3, 0.2, 0.02),
    "drift-0.8": lambda rng: abba(rng, 0.8, 0.2, 0.02),
    "drift-0.99": lambda rng: abba(rng, 0.99, 0.5, 0.02),
}


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("noise", NOISES)
def test_coverage_under_peeking(noise: str, alpha: float) -> None:
    rng = np.random.default_rng(20261130)
    effect = 0.1
    missed = ever_missed(NOISES[noise](rng) + effect, effect, alpha)
    # Monte Carlo error: three standard deviations of a share of alpha
    assert missed <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / REPETITIONS)


def test_the_simulation_would_notice_a_bad_interval() -> None:
    # A fixed-n t interval, peeked at, misses far more often than alpha: the check above has teeth.
    from scipy.stats import t as student

    x = np.random.default_rng(1).normal(size=(REPETITIONS, PAIRS))
    n = np.arange(2, PAIRS + 1)
    average = (np.cumsum(x, axis=1) / np.arange(1, PAIRS + 1))[:, 1:]
    sd = np.sqrt((np.cumsum(x * x, axis=1)[:, 1:] - n * average**2) / (n - 1))
    missed = (np.abs(average) > student.ppf(0.975, n - 1) * sd / np.sqrt(n)).any(axis=1).mean()
    assert missed > 0.2


def log_e_value(x: list[float], m: float = 0.0) -> float:
    """log E_n(m): evidence against mean = m; the interval is inverted from it. Held against its definition below."""
    n = len(x)
    v = sum((value - m) ** 2 for value in x)
    s = sum(value - m for value in x)
    return 0.5 * math.log(C2 / (n + C2)) + n / 2 * math.log(v / (v - s * s / (n + C2))) if v else 0.0


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=40).filter(lambda v: np.std(v) > 1e-3),
    st.sampled_from([0.05, 0.01, 0.001]),
)
@settings(max_examples=150, deadline=None)
def test_the_interval_is_the_set_where_the_e_value_is_small(values: list[float], alpha: float) -> None:
    interval = confidence_sequence(values, alpha)
    if math.isinf(interval.high):
        assert log_e_value(values, interval.mean + 1e6) < math.log(1 / alpha) + 1e-6
        return
    assert log_e_value(values, interval.low) == pytest.approx(math.log(1 / alpha), rel=1e-6)
    assert log_e_value(values, interval.high) == pytest.approx(math.log(1 / alpha), rel=1e-6)
    assert log_e_value(values, interval.mean) < 0


def test_e_value_against_the_defining_integral() -> None:
    """Numerical double mixture: N(0, 1/c2) over mean/sd in the numerator, d sd/sd in both."""
    x = np.array([0.30, 0.22, 0.35, 0.18])
    log_sd = np.linspace(-6, 4, 1500)[:, None]
    effect = np.linspace(-12, 20, 1500)[None, :]
    sd = np.exp(log_sd)
    z = x[None, None, :] / sd[:, :, None]
    likelihood = np.exp(-0.5 * ((z - effect[:, :, None]) ** 2).sum(axis=2)) * sd ** -len(x)
    prior = math.sqrt(C2 / (2 * math.pi)) * np.exp(-0.5 * C2 * effect**2)
    numerator = (likelihood * prior).sum() * (effect[0, 1] - effect[0, 0])
    denominator = (np.exp(-0.5 * (z**2).sum(axis=2)) * sd ** -len(x)).sum()
    assert log_e_value(list(x)) == pytest.approx(math.log(numerator / denominator), rel=1e-3)


def test_large_effects_need_five_or_six_pairs() -> None:
    rng = np.random.default_rng(5)
    needed = []
    for _ in range(400):
        x = math.log(1.3) + rng.normal(size=40) * 0.05
        needed.append(next(n for n in range(4, 41) if confidence_sequence(x[:n], 0.02).low > math.log(1.02)))
    assert np.median(needed) <= 5 and np.quantile(needed, 0.9) <= 7


def test_interval_scales_shifts_and_narrows() -> None:
    x = [0.1, 0.2, 0.15, 0.12, 0.17]
    one, two = confidence_sequence(x, 0.05), confidence_sequence([3 * v + 1 for v in x], 0.05)
    assert two.low == pytest.approx(3 * one.low + 1) and two.high == pytest.approx(3 * one.high + 1)
    longer = confidence_sequence(x * 3, 0.05)
    assert one.low < longer.low < longer.mean < longer.high < one.high
    stricter = confidence_sequence(x, 0.01)
    assert stricter.low < one.low and stricter.high > one.high
    assert one.high_ratio == pytest.approx(math.exp(one.high))


def test_too_few_pairs_say_nothing() -> None:
    for n in (1, 2):
        interval = confidence_sequence([0.5] * n, 0.05)
        assert (interval.low, interval.high) == (-math.inf, math.inf)
        assert (interval.low_ratio, interval.high_ratio) == (0.0, math.inf)


def test_identical_ratios_are_not_certainty() -> None:
    interval = confidence_sequence([0.0] * 8, 0.05)
    assert interval.low < 0 < interval.high < 0.01


@pytest.mark.parametrize(
    ("x", "alpha"), [([], 0.05), ([math.nan], 0.05), ([math.inf], 0.05), ([0.1], 0.0), ([0.1], 1.0)]
)
def test_bad_input_is_refused(x: list[float], alpha: float) -> None:
    with pytest.raises(ValueError):
        confidence_sequence(x, alpha)


def test_detectable_effect_is_detected_with_its_power() -> None:
    rng = np.random.default_rng(11)
    sd, pairs, alpha = 0.04, 10, 0.02
    effect = math.log(detectable_effect(sd, pairs, alpha))
    found = np.mean([confidence_sequence(effect + rng.normal(size=pairs) * sd, alpha).low > 0 for _ in range(3000)])
    assert 0.72 < found < 0.88
    assert detectable_effect(sd, 20, alpha) < detectable_effect(sd, pairs, alpha)
    assert detectable_effect(sd, 2, 0.001) == math.inf
    assert detectable_effect(0.0, pairs, alpha) == 1.0
    with pytest.raises(ValueError):
        detectable_effect(sd, 1, alpha)


def test_pairs_needed_inverts_detectable_effect() -> None:
    pairs = pairs_needed(0.05, 1.05, 0.02)
    assert pairs is not None
    assert detectable_effect(0.05, pairs, 0.02) <= 1.05 < detectable_effect(0.05, pairs - 1, 0.02)
    assert pairs_needed(0.5, 1.001, 0.02, most=50) is None


def test_levels_sum_to_alpha_without_discoveries_and_grow_with_them() -> None:
    assert sum(level_for(k, 0, 0.05) for k in range(1, 200_000)) == pytest.approx(0.05, rel=0.01)
    assert level_for(10, 0, 0.05) > 0.05 * 6 / math.pi**2 / 100
    assert level_for(10, 3, 0.05) == pytest.approx(4 * level_for(10, 0, 0.05))
    for bad in ((0, 0), (1, 1), (3, -1)):
        with pytest.raises(ValueError):
            level_for(*bad, 0.05)
    with pytest.raises(ValueError):
        level_for(1, 0, 1.5)


def test_false_gains_stay_rare_over_a_whole_run() -> None:
    """Forty candidates without effect, peeked at: the chance of any false gain (all gains false: FDR) is below alpha."""
    rng = np.random.default_rng(3)
    alpha, runs, false_runs = 0.1, 400, 0
    for _ in range(runs):
        gains = 0
        for index in range(1, 41):
            level = level_for(index, gains, alpha)
            x = rng.normal(size=12) * 0.05
            n = np.arange(1, 13)
            average = np.cumsum(x) / n
            sd = np.sqrt(np.cumsum(x * x) / n - average**2)
            radius = np.array([_radius_in_sd(int(k), level, C2) for k in n[3:]])
            gains += bool((average[3:] > radius * sd[3:]).any())
        false_runs += gains > 0
    assert false_runs / runs <= alpha


def test_sample_sd() -> None:
    assert sample_sd([]) == sample_sd([0.3]) == 0.0
    assert sample_sd([1.0, 3.0]) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.003])
def test_level_of_inverts_the_interval(alpha: float) -> None:
    x = [0.20, 0.26, 0.18, 0.31, 0.22, 0.25]
    interval = confidence_sequence(x, alpha)
    assert level_of(x, interval.high - interval.mean) == pytest.approx(alpha, rel=1e-6)


def test_level_of_a_half_width_that_no_level_gives() -> None:
    x = [0.20, 0.26, 0.18, 0.31, 0.22, 0.25]
    assert level_of(x, 1e-4) is None
    two = confidence_sequence(x[:2], 0.4)
    assert math.isfinite(two.high) and level_of(x[:2], two.high - two.mean) == pytest.approx(0.4, rel=1e-6)
