"""The test on sampled tokens: holds its level on true samples, finds greedy and truncated sampling."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from specpilot.evaluation.client import Position
from specpilot.gate.distribution import check_distribution, place

VOCAB = 50


def position(token: int, probabilities: list[float], listed: int = VOCAB) -> Position:
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    top = [(i, math.log(probabilities[i])) for i in order[:listed]]
    own = math.log(probabilities[token])
    return Position(
        index=1,
        token=token,
        token_logprob=own,
        top_token=top[0][0],
        top_logprob=top[0][1],
        gap=top[0][1] - own,
        top=top,
    )


def distribution(source: random.Random) -> list[float]:
    weights = [math.exp(source.gauss(0.0, 2.0)) for _ in range(VOCAB)]
    return [w / sum(weights) for w in weights]


def tempered(probabilities: list[float], temperature: float) -> list[float]:
    weights = [p ** (1 / temperature) for p in probabilities]
    return [w / sum(weights) for w in weights]


def samples(seed: int, count: int, temperature: float, pick: Any, listed: int = VOCAB) -> list[Position]:
    source = random.Random(seed)
    result = []
    for _ in range(count):
        raw = distribution(source)
        result.append(position(pick(source, tempered(raw, temperature)), raw, listed))
    return result


def honest(source: random.Random, p: list[float]) -> int:
    return source.choices(range(VOCAB), p)[0]


def test_place_by_hand() -> None:
    probabilities = [0.5, 0.3, 0.2]
    found = place(position(1, probabilities), 1.0, 3)
    assert found is not None
    assert (found.before, found.own, found.best, found.is_best) == pytest.approx((0.5, 0.3, 0.5, False))
    # temperature 0.5 squares: 0.25, 0.09, 0.04 over 0.38
    found = place(position(0, probabilities), 0.5, 3)
    assert found is not None
    assert (found.before, found.own, found.is_best) == pytest.approx((0.0, 0.25 / 0.38, True))


def test_token_outside_the_listed_ones_lies_in_the_tail() -> None:
    found = place(position(2, [0.5, 0.3, 0.2], listed=2), 1.0, 3)
    assert found is not None
    assert (found.before, found.own, found.is_best) == pytest.approx((0.8, 0.2, False))


def test_unknown_normaliser_gives_no_place() -> None:
    assert place(position(0, [0.5, 0.3, 0.2], listed=2), 2.0, 100_000) is None


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_true_samples_pass_at_six_seeds(temperature: float) -> None:
    for seed in range(6):
        assert check_distribution(samples(seed, 300, temperature, honest), temperature, 1e-4).passed, seed


def test_true_samples_pass_when_only_the_best_ten_are_listed() -> None:
    assert check_distribution(samples(3, 400, 1.0, honest, listed=10), 1.0, 1e-4).passed


def greedy(source: random.Random, p: list[float]) -> int:
    return max(range(VOCAB), key=lambda i: p[i])


def cooler(source: random.Random, p: list[float]) -> int:
    return honest(source, tempered(p, 0.6))


def top_three(source: random.Random, p: list[float]) -> int:
    best = sorted(range(VOCAB), key=lambda i: -p[i])[:3]
    return source.choices(best, [p[i] for i in best])[0]


@pytest.mark.parametrize("pick", [greedy, cooler, top_three])
def test_other_samplers_are_found(pick: Any) -> None:
    assert not check_distribution(samples(1, 400, 1.0, pick), 1.0, 1e-4).passed


def test_too_few_positions_do_not_pass() -> None:
    check = check_distribution(samples(1, 49, 1.0, honest), 1.0, 1e-4)
    assert not check.passed
    assert "50 needed" in check.detail


def test_greedy_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        check_distribution([], 0.0, 1e-4)
