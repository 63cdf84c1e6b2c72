"""The closing session judged, by hand: which figures are worth nothing, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specpilot.contracts import Calibration, Leg
from specpilot.evaluation.client import Position
from specpilot.gate.closing import closing_checks, faults_of
from specpilot.gate.records import GatePolicy, TimeFloor

from .builders import generation, leg, position

CALIBRATION = Calibration(
    epsilon=0.02, near_tie_rate_limit=0.02, positions=1000, near_ties=0, max_gap=0.0, gap_quantiles={}, method="by hand"
)
TARGET = [11, 12, 13, 14, 15, 16, 17, 18]


class Reference:
    """Knows one answer; any other token is one nat worse, but tokens from 1000 on only so many thousandths."""

    def score(self, ids: list[int], start: int, top: int = 2) -> Sequence[Any]:
        return [
            position(token, right, 0.0 if token == right else max(token - 1000, 0) / 1000 or 1.0, start + k)
            for k, (token, right) in enumerate(zip(ids[start:], TARGET, strict=True))
        ]


def session(**answers: list[dict[str, Any]]) -> dict[str, list[Leg]]:
    """One leg per answer; each is `TARGET` at the builders' pace, with changes."""
    return {
        name.replace("_", "-"): [
            leg([generation(change.pop("output", TARGET), f"p{k}", **change)], name) for k, change in enumerate(changes)
        ]
        for name, changes in answers.items()
    }


def faults(legs: dict[str, list[Leg]], **options: Any) -> dict[str, str]:
    return faults_of(closing_checks(legs, Reference(), CALIBRATION, GatePolicy(), **({"block_size": 8} | options)))


def test_right_answers_have_no_fault() -> None:
    assert faults(session(ar=[{}, {}], stock=[{}, {}], final=[{}, {}], final_ar=[{}, {}])) == {}
    assert faults({}) == {}
    checks = closing_checks(
        session(stock=[{}, {}], final=[{}, {}]), Reference(), CALIBRATION, GatePolicy(), block_size=8
    )
    assert checks["final"][-1].detail.startswith("16 positions: 16 exact, 0 near-ties")


@pytest.mark.parametrize("name", ["final", "final_ar"])
def test_one_wrong_token_withholds_the_figures(name: str) -> None:
    wrong = {"output": [*TARGET[:5], 7, *TARGET[6:]]}
    found = faults(session(ar=[{}, {}], stock=[{}, {}], **{name: [{}, wrong]}))
    assert list(found) == [name.replace("_", "-")]
    (told,) = found.values()
    assert "forcing.closing" in told and "1 violations" in told and "p1 at output position 5" in told


def test_the_untouched_engines_are_not_judged() -> None:
    """They are code that the user gave; `ar` may round where the reference does not."""
    assert faults(session(ar=[{"output": [7] * 8}], stock=[{"output": [7] * 8}])) == {}


def off(thousandths: int) -> dict[str, Any]:
    """An answer with one token so far from the reference's."""
    return {"output": [*TARGET[:3], 1000 + thousandths, *TARGET[4:]]}


@pytest.mark.parametrize(
    ("shown", "found", "withheld"),
    [
        (50, 80, False),  # within twice what the untouched engine shows
        (50, 101, True),
        (0, 80, True),  # nothing shown: the reference's own epsilon of 0.02
        (400, 499, False),
        (400, 501, True),  # never beyond half a nat
    ],
)
def test_final_ar_may_round_as_the_untouched_ar_does(shown: int, found: int, withheld: bool) -> None:
    legs = session(ar=[off(shown) if shown else {}, {}], stock=[{}, {}], final_ar=[{}, off(found)])
    assert list(faults(legs)) == (["final-ar"] if withheld else [])


def test_final_is_held_to_the_reference_alone() -> None:
    assert list(faults(session(ar=[off(50)], stock=[{}], final=[off(30)]))) == ["final"]


def test_final_ar_is_held_to_the_share_of_tokens_that_ar_shows_unlike() -> None:
    """One in 24 of `ar` against all but one of `final-ar`."""
    strange = {"output": [1030] * 7 + TARGET[7:]}
    legs = session(ar=[off(50), {}, {}], stock=[{}, {}, {}], final_ar=[dict(strange) for _ in range(3)])
    assert "21 near-ties" in faults(legs)["final-ar"]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"output": [*TARGET[:7], 99]}, {"vocab": 50}, "lengths.known"),
        ({"claimed_tokens": 9}, {}, "accounting.tokens"),
        ({"first_chunk_tokens": 7}, {"block_size": 4}, "accounting.first-chunk"),
        ({"last_s": 1.001}, {"floor": TimeFloor(round_s=0.002)}, "timing.possible"),
        ({"first_s": 1.06, "last_s": 1.07}, {}, "timing.first-token"),
    ],
)
def test_what_the_gate_would_refuse_is_refused_here(change: dict, options: dict, words: str) -> None:
    found = faults(session(stock=[{}], final=[change]), **options)
    assert list(found) == ["final"] and found["final"].startswith(words)


def test_sampled_answers_are_held_against_the_distribution() -> None:
    """Always the best token, where it has a probability of one half: no sampler gives that a hundred and sixty times."""

    class Even:
        def score(self, ids: list[int], start: int, top: int = 2) -> Sequence[Position]:
            even = [(1, -0.6931472), (2, -0.6931472)]
            return [
                Position(index=k, token=ids[k], token_logprob=-0.6931472, top_token=1, top_logprob=-0.6931472, gap=0.0, top=even)
                for k in range(start, len(ids))
            ]  # fmt: skip

    def judged(output: list[int]) -> dict[str, str]:
        legs = session(final=[{"output": output} for _ in range(20)])
        return faults_of(closing_checks(legs, Even(), CALIBRATION, GatePolicy(), block_size=8, temperature=1.0))

    assert judged([1, 2, 2, 1, 2, 1, 1, 2]) == {}
    assert judged([1] * 8)["final"].startswith("distribution")
