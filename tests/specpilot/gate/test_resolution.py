"""What the A/A pairs tell: no bias, a bias, or nothing that a small gain could rest on."""

from __future__ import annotations

import math

import pytest

from specpilot.evaluation.stats import Interval, confidence_sequence
from specpilot.gate.errors import GateUnsoundError
from specpilot.gate.records import SelfTestResult
from specpilot.gate.selftest import AA_ALPHA, require_sound, resolution_note, says_enough


def result(ratio: float, low: float, high: float, pairs: int = 4) -> SelfTestResult:
    return SelfTestResult(
        passed=True, outcomes=[], null_ratio=ratio, null_low=low, null_high=high, null_decision="null",
        null_pairs=[ratio] * pairs, min_effect=1.02,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "enough"),
    [
        (0.95, 1.05, True),
        (0.58, 1.57, False),
        (0.95, 1.2, False),
        (0.85, 1.05, False),
        (0.0, math.inf, False),
        (1.12, 1.6, True),  # a bias: more pairs only cost time
        (0.6, 0.9, True),
    ],
)
def test_pairs_go_on_until_they_tell_something(low: float, high: float, enough: bool) -> None:
    ends = [math.log(end) if end > 0 else -math.inf for end in (low, high)]
    assert (
        says_enough(
            Interval(mean=sum(ends) / 2 if math.isfinite(ends[0]) else 0.0, low=ends[0], high=ends[1], n=4), 1.02
        )
        is enough
    )


def test_noise_of_six_per_cent_needs_more_than_four_pairs() -> None:
    """The recorded A/A of 0.96 [0.58, 1.57]: four pairs of such noise tell nothing, twelve tell a tenth or so."""
    pairs = [0.06, -0.07, 0.05, -0.04, -0.06, 0.07, 0.04, -0.05, 0.06, -0.06, 0.05, -0.05]
    four, twelve = confidence_sequence(pairs[:4], AA_ALPHA), confidence_sequence(pairs, AA_ALPHA)
    assert four.high_ratio > 1.4 and not says_enough(four, 1.02)
    assert twelve.high_ratio < 1.15


def test_a_wide_interval_is_told_and_ends_nothing() -> None:
    wide = result(0.958, 0.583, 1.574)
    assert wide.told_apart == pytest.approx(1 / 0.583) and not wide.biased
    require_sound(wide)
    note = resolution_note(wide)
    assert "below 1.72x apart" in note and "0.96x [0.58, 1.57] over 4 pairs" in note
    assert result(
        1.0, 0.0, math.inf
    ).told_apart == math.inf and "could not tell any difference apart" in resolution_note(result(1.0, 0.0, math.inf))
    assert resolution_note(result(1.0, 0.95, 1.06)) == ""
    assert resolution_note(SelfTestResult(passed=True, outcomes=[])) == "", "no pairs were asked for"


@pytest.mark.parametrize(("ratio", "low", "high"), [(1.05, 1.021, 1.08), (0.95, 0.92, 0.979)])
def test_a_bias_ends_the_run_either_way_round(ratio: float, low: float, high: float) -> None:
    biased = result(ratio, low, high)
    assert biased.biased
    with pytest.raises(GateUnsoundError, match="against itself came out as different"):
        require_sound(biased.model_copy(update={"passed": False}))


@pytest.mark.parametrize(("low", "high"), [(1.005, 1.03), (1.019, 1.04), (0.97, 0.995), (0.96, 0.981)])
def test_two_processes_of_one_program_may_differ_by_less_than_any_gain(low: float, high: float) -> None:
    """A quiet machine tells half a per cent apart, and where two processes' memory lies is worth that."""
    assert not result((low + high) / 2, low, high).biased
