"""Classification of forced positions, hand-computed, with every boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from specpilot.contracts import Calibration, Generation, Reason
from specpilot.gate.errors import EvidenceError
from specpilot.gate.forcing import classify, ends_first, force, summarise, tally_sequence
from specpilot.gate.records import GatePolicy
from specpilot.gate.verdict import forcing_check

from .builders import generation, position

EPSILON = 0.125  # exact in binary


def calibration(limit: float = 0.01) -> Calibration:
    return Calibration(
        epsilon=EPSILON,
        near_tie_rate_limit=limit,
        positions=1000,
        near_ties=0,
        max_gap=0.0,
        gap_quantiles={},
        method="by hand",
    )


@pytest.mark.parametrize(
    ("token", "top", "gap", "kind"),
    [
        (5, 5, 0.0, "exact"),
        (5, 6, 0.0, "near-tie"),  # an exact tie that the other index wins
        (5, 6, EPSILON, "near-tie"),  # the boundary belongs to the near-ties
        (5, 6, math.nextafter(EPSILON, 1.0), "violation"),
        (5, 6, math.inf, "violation"),
        (5, 6, math.nan, "violation"),
        (5, 5, math.nan, "violation"),  # NaN logits: an argmax of nothing
        (5, 6, -0.01, "violation"),  # cannot be better than the best
    ],
)
def test_classify(token: int, top: int, gap: float, kind: str) -> None:
    class Raw:
        pass

    raw: Any = Raw()
    raw.token, raw.top_token, raw.gap = token, top, gap
    assert classify(raw, EPSILON) == kind


def test_epsilon_zero_accepts_exact_ties_only() -> None:
    assert classify(position(5, 6, 0.0), 0.0) == "near-tie"
    assert classify(position(5, 6, 1e-12), 0.0) == "violation"


def test_tally_counts_and_names_the_first_violation() -> None:
    answer = generation([7, 8, 9, 10])
    scored = [position(7, 7, 0.0), position(8, 80, 0.1), position(9, 90, 2.0), position(10, 100, 3.0)]
    tally = tally_sequence(answer, scored, EPSILON)
    assert (tally.positions, tally.exact, tally.near_ties, tally.violations) == (4, 1, 1, 2)
    assert tally.max_gap == 3.0
    assert tally.first_violation == 2
    assert tally.first_violation_note == "emitted 9, reference 90, gap 2.0000 nats"
    assert tally.near_tie_gaps == [0.1]


def test_empty_output_has_no_positions() -> None:
    tally = tally_sequence(generation([]), [], EPSILON)
    assert (tally.positions, tally.violations, tally.max_gap, tally.first_violation) == (0, 0, 0.0, None)


def test_misaligned_evidence_is_our_fault_not_the_candidates() -> None:
    with pytest.raises(EvidenceError, match="scored 1 positions of 2"):
        tally_sequence(generation([7, 8]), [position(7, 7, 0.0)], EPSILON)
    with pytest.raises(EvidenceError, match="token 9 at output position 1"):
        tally_sequence(generation([7, 8]), [position(7, 7, 0.0), position(9, 9, 0.0)], EPSILON)
    assert EvidenceError("x").exit_code == 9


def test_last_and_first_answers_are_scored_first() -> None:
    answers = [generation([1], f"p{i}") for i in range(5)]
    assert [g.prompt_id for g in ends_first(answers)] == ["p4", "p0", "p3", "p2", "p1"]
    assert [g.prompt_id for g in ends_first(answers[:2])] == ["p1", "p0"]
    assert ends_first([]) == []


class Table:
    """A scorer that agrees with every token except those in `wrong`."""

    def __init__(self, wrong: set[int]) -> None:
        self.wrong = wrong
        self.asked: list[tuple[list[int], int]] = []

    def score(self, ids: list[int], start: int, top: int = 2) -> Sequence[Any]:
        self.asked.append((ids, start))
        return [
            position(t, 999, 5.0, i) if t in self.wrong else position(t, t, 0.0, i)
            for i, t in enumerate(ids[start:], start)
        ]


def test_force_sends_prompt_and_output_and_never_an_empty_answer() -> None:
    scorer = Table(set())
    tally = force(scorer, [generation([7, 8]), generation([], "empty")], EPSILON)
    assert scorer.asked == [([1, 2, 3, 7, 8], 3)]
    assert (tally.positions, tally.exact, tally.skipped, len(tally.sequences)) == (2, 2, 0, 2)


def test_force_stops_after_enough_violations_and_says_what_it_left_out() -> None:
    answers: list[Generation] = [generation([50 + i], f"p{i}") for i in range(8)]
    tally = force(Table({57}), answers, EPSILON, stop_after=1, parallel=2)  # p7, the last, is scored first
    assert tally.violations == 1
    assert tally.skipped == 6


def test_one_violation_is_a_token_mismatch_and_a_crowd_of_near_ties_a_rate() -> None:
    policy = GatePolicy()
    bad = summarise([tally_sequence(generation([9]), [position(9, 90, 2.0)], EPSILON)])
    check, reason = forcing_check("f", bad, calibration(), policy)
    assert not check.passed
    assert reason is Reason.token_mismatch

    def ties(k: int, n: int) -> bool:
        scored = [position(i, 1000 + i, 0.05) if i < k else position(i, i, 0.0) for i in range(n)]
        check, reason = forcing_check(
            "f", summarise([tally_sequence(generation(list(range(n))), scored, EPSILON)]), calibration(), policy
        )
        assert reason is Reason.near_tie_rate
        return check.passed

    # At a limit of 1 % and 200 positions, P(X >= 8) = 1.01e-3 is still allowed at 99.9 %, P(X >= 9) = 2.1e-4 is not.
    assert ties(0, 200)
    assert ties(8, 200)
    assert not ties(9, 200)


def test_nothing_forced_is_no_violation() -> None:
    check, _ = forcing_check("f", summarise([]), calibration(), GatePolicy())
    assert check.passed
