"""Binomial bounds against closed forms and scipy.stats' own distributions."""

from __future__ import annotations

import pytest
from scipy import stats

from specpilot.gate.bounds import binomial_tail, binomial_upper, chi_square_tail, quantile


def test_upper_bound_of_no_success_has_a_closed_form() -> None:
    # (1 - p)^n = 1 - confidence
    assert binomial_upper(0, 100, 0.95) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)


@pytest.mark.parametrize(("k", "n"), [(1, 50), (7, 300), (299, 300)])
def test_upper_bound_is_where_the_lower_tail_equals_the_error(k: int, n: int) -> None:
    bound = binomial_upper(k, n, 0.99)
    assert stats.binom.cdf(k, n, bound) == pytest.approx(0.01, rel=1e-6)


def test_upper_bound_edges() -> None:
    assert binomial_upper(0, 0, 0.9) == 1.0
    assert binomial_upper(5, 5, 0.9) == 1.0
    for bad in ((-1, 5), (6, 5), (0, -1)):
        with pytest.raises(ValueError, match="cannot be"):
            binomial_upper(*bad, 0.9)
    with pytest.raises(ValueError, match="confidence"):
        binomial_upper(1, 5, 1.0)


def test_tail_matches_scipy_and_edges() -> None:
    assert binomial_tail(3, 40, 0.02) == pytest.approx(stats.binom.sf(2, 40, 0.02), rel=1e-9)
    assert binomial_tail(0, 40, 0.02) == 1.0
    assert binomial_tail(41, 40, 0.02) == 0.0
    assert binomial_tail(1, 10, 0.0) == 0.0


def test_chi_square_at_its_tabulated_95_percent_point() -> None:
    assert chi_square_tail(16.919, 9) == pytest.approx(0.05, abs=1e-4)


def test_quantile_is_a_value_of_the_sample() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert quantile(values, 0.5) == 3.0
    assert quantile(values, 0.6) == 3.0
    assert quantile(values, 0.61) == 4.0
    assert quantile(values, 0.999) == 5.0
    assert quantile(values, 0.0) == 1.0
    assert quantile([], 0.5) == 0.0
