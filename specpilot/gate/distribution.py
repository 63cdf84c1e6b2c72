"""Test of sampled answers (temperature above 0) against the reference's distribution.

Under the null every sampled token comes from the reference's tempered distribution given the answer's own
prefix. Then (1) the randomised probability integral transform of the tokens is uniform on [0, 1] (Smith 1985; the form
for discrete variables of Brockwell 2007) and (2) the number of argmax tokens has the mean and variance that the reference's
probabilities give. Both are tested, each at half the level. Pure functions on scored positions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specpilot.contracts import Check
from specpilot.gate.bounds import chi_square_tail

BINS = 10
SMALLEST_SAMPLE = 5 * BINS
"""Usual rule of five expected counts per cell of a chi-square test."""


class DistributionPosition(Protocol):
    """One forced position with the best tokens of the reference's distribution at temperature 1, best first."""

    @property
    def token(self) -> int: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


@dataclass(frozen=True)
class Place:
    """Where a token lies in the tempered distribution: probabilities before it, of it, and of the argmax."""

    before: float
    own: float
    best: float
    is_best: bool


def place(position: DistributionPosition, temperature: float, vocab: int, doubt: float = 0.01) -> Place | None:
    """Place of the emitted token when tokens are laid out from most to least probable.

    The tail beyond the listed tokens has known mass at temperature 1; at temperature T its tempered mass is at most
    tail^(1/T) N^(1-1/T) for T > 1 (Hoelder) and (p_k)^(1/T-1) tail for T < 1. Positions whose normaliser is
    in doubt by more than `doubt` give None; that depends on the distribution and not on the token, so leaving them out is fair.
    """
    power = 1.0 / temperature
    probabilities = [math.exp(logprob) for _, logprob in position.top]
    weights = [p**power for p in probabilities]
    tail = max(0.0, 1.0 - sum(probabilities))
    if power == 1.0:
        tail_weight, uncertain = tail, 0.0
    else:
        most = tail**power * vocab ** (1.0 - power) if power < 1.0 else tail * probabilities[-1] ** (power - 1.0)
        tail_weight, uncertain = most / 2.0, most / 2.0
    total = sum(weights) + tail_weight
    if uncertain > doubt * total:
        return None
    tokens = [token for token, _ in position.top]
    if position.token in tokens:
        rank = tokens.index(position.token)
        return Place(sum(weights[:rank]) / total, weights[rank] / total, weights[0] / total, rank == 0)
    return Place(sum(weights) / total, tail_weight / total, weights[0] / total, False)


def uniform_test(places: Sequence[Place], seed: int) -> float:
    """p-value of chi-square over ten equal cells of before + u * own, u uniform from a generator with `seed`."""
    source = random.Random(seed)
    counts = [0] * BINS
    for item in places:
        value = item.before + source.random() * item.own
        counts[min(int(value * BINS), BINS - 1)] += 1
    expected = len(places) / BINS
    return chi_square_tail(sum((c - expected) ** 2 / expected for c in counts), BINS - 1)


def argmax_test(places: Sequence[Place]) -> float:
    """Two-sided p-value of the number of argmax tokens, by the normal limit of sums of independent indicators."""
    variance = sum(item.best * (1.0 - item.best) for item in places)
    excess = sum(float(item.is_best) - item.best for item in places)
    if variance < 1e-9:
        return 1.0 if abs(excess) < 0.5 else 0.0
    return math.erfc(abs(excess) / math.sqrt(2.0 * variance))


def check_distribution(
    positions: Sequence[DistributionPosition],
    temperature: float,
    alpha: float,
    *,
    vocab: int = 262_144,
    seed: int = 20261130,
) -> Check:
    """Sampled tokens fit the reference at `temperature` (> 0) at level `alpha`.

    Fewer than 50 usable positions cannot be tested and do not pass: ask for more sampled tokens.
    """
    name = "distribution"
    if not temperature > 0.0:
        raise ValueError(f"a distribution test needs a temperature above 0, got {temperature}")
    found = [place(p, temperature, vocab) for p in positions]
    places = [item for item in found if item is not None]
    if len(places) < SMALLEST_SAMPLE:
        detail = f"{len(places)} usable of {len(positions)} positions, {SMALLEST_SAMPLE} needed"
        return Check(name=name, passed=False, detail=detail)
    uniform, argmax = uniform_test(places, seed), argmax_test(places)
    rate = sum(p.is_best for p in places) / len(places)
    expected = sum(p.best for p in places) / len(places)
    detail = (
        f"temperature {temperature:g}, {len(places)} positions: uniformity p={uniform:.2g}, "
        f"argmax share {rate:.3f} where {expected:.3f} is due p={argmax:.2g}"
    )
    return Check(name=name, passed=min(uniform, argmax) >= alpha / 2.0, detail=detail)
