"""What the report says in words about roofs, noise and baselines."""

from __future__ import annotations

import math

import pytest

from specpilot.contracts import Calibration
from specpilot.report.data import Ratio, ReportData, SelfTest
from specpilot.report.html import render_report
from specpilot.report.summary import facts, headline
from specpilot.words import count
from tests.specpilot.report.sample import AFTER, report_data


def noisy(low: float, high: float, pairs: list[float], ratio: float = 3.88) -> ReportData:
    return report_data().model_copy(
        update={
            "ratios": [Ratio(of="final", over="stock", ratio=ratio, low=low, high=high)],
            "self_test": SelfTest(passed=True, null_pairs=pairs),
        }
    )


def test_a_quiet_session_is_not_mentioned() -> None:
    assert noisy(3.11, 3.86, [1.01, 0.98, 1.0, 1.03], 3.46).noise == ""
    assert report_data().noise == ""
    assert noisy(0.95, 1.08, [], 1.01).noise == "", "a narrow interval around no effect"
    assert "noisy" not in render_report(report_data())


def test_a_wide_interval_is_said_with_its_figures() -> None:
    """Half of log(8.54 / 1.76) is 0.79; half of log 3.88 is 0.68."""
    data = noisy(1.76, 8.54, [])
    assert data.noise == (
        "final over stock, 3.88x, is only known to lie between 1.76 and 8.54: run it again on a quieter machine for closer figures"
    )
    assert any(line.startswith("noise    final over stock") for line in facts(data))
    assert "This session was noisy: final over stock" in render_report(data)


@pytest.mark.parametrize(("low", "high"), [(0.0, 8.0), (1.0, math.inf)])
def test_an_open_interval_is_wide(low: float, high: float) -> None:
    assert "only known to lie" in noisy(low, high, []).noise


def test_an_engine_that_wanders_against_itself_is_noisy() -> None:
    """exp(+-0.2): the sample standard deviation of four is 0.2 sqrt(4 / 3) = 0.231, so 26 %."""
    up = math.exp(0.2)
    told = noisy(3.11, 3.86, [up, 1 / up, up, 1 / up], 3.46).noise
    assert told.startswith("the unchanged engine against itself wandered by 26% from pair to pair")
    assert "of 4 pairs" in told and "final over stock" not in told


def test_each_share_names_its_roof() -> None:
    data = report_data()
    assert data.gaps_after is not None and data.gaps_before is not None
    once = data.roofs
    assert len(once) == 1 and "every share of a bound refers to it" in once[0]
    moved = data.gaps_after.model_copy(update={"hardware": data.gaps_after.hardware | {"bandwidth_gbs": 39.04}})
    data = data.model_copy(update={"gaps_after": moved, "hardware": data.hardware | {"best": {"read_gbs": 47.25}}})
    drawn, began = data.roofs
    assert "39.0 GB/s" in drawn and "upright marks" in drawn
    assert f"{data.gaps_before.hardware['bandwidth_gbs']:.1f} GB/s" in began and "47.2 GB/s" in began
    page = render_report(data)
    assert page.count("39.0 GB/s") >= 1 and "The roof when the run began" in page
    assert any("by the roof measured around it" in line for line in headline(data))
    assert ReportData(deployment="d", run_id="r").roofs == []


def test_each_round_time_says_how_it_was_measured() -> None:
    """Closing session: 3.06 tokens a round at 149.7 tokens/s are 20.4 ms; the components of AFTER add up to 21.07 ms."""
    data = report_data()
    assert data.gaps_after is not None and data.gaps_before is not None
    after = data.gaps_after.model_copy(update={"round_ms": 19.5})
    timed, traced, closing = data.model_copy(update={"gaps_after": after}).rounds_told
    assert timed.startswith(f"Timed, tracing off: {data.gaps_before.round_ms:.1f} ms for stock and 19.5 ms for final.")
    assert f"{sum(AFTER.values()):.1f} ms for final" in traced and "tracing on" in traced
    assert closing.startswith("Timed in the closing session: 20.4 ms for final") and "hidden prompts" in closing
    page = render_report(data)
    assert (
        "ms a round (timed)" in page
        and "Components: profiled, tracing on." in page
        and "Timed in the closing session" in page
    )
    shared = after.model_copy(update={"hardware": after.hardware | {"regime": {"requests": 4}}})
    assert len(data.model_copy(update={"gaps_after": shared}).rounds_told) == 2, "a round of four requests is shared"
    assert ReportData(deployment="d", run_id="r").rounds_told == []


def test_counts_agree_with_their_nouns() -> None:
    assert [count(n, "pair") for n in (0, 1, 2)] == ["0 pairs", "1 pair", "2 pairs"]
    assert count(1_530, "token") == "1,530 tokens" and count(1.0, "round") == "1.0 round"
    assert count(2, "entry", "entries") == "2 entries" and count("?", "prompt") == "? prompts"


def test_a_baseline_beyond_epsilon_is_explained_beside_its_figure() -> None:
    note = "ar: 143 of 144 positions exact, 0 near-ties (0.00%), 1 beyond epsilon, largest gap 0.0390 nats"
    calibration = Calibration(
        epsilon=0.02, near_tie_rate_limit=0.01, positions=640, near_ties=2, max_gap=0.0084, gap_quantiles={},
        method="m", baseline_note=note,
    )  # fmt: skip
    page = render_report(report_data().model_copy(update={"calibration": calibration}))
    after = page[page.index(note) :][:400]
    assert "compared, not gated" in after and "BF16" in after and "float32" in after
