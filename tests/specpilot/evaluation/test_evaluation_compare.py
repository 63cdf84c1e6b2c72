"""Comparisons of real processes with known delays: the known ratio is found, and only what is real is a gain."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from specpilot.contracts import Comparison, Generation, Leg, Reason
from specpilot.deployment import Deployment, MeasurementSettings, Regime
from specpilot.errors import UsageError
from specpilot.evaluation.client import EngineClient
from specpilot.evaluation.compare import PairEvent, compare, is_decided, seen_end_to_end, stray_work
from specpilot.evaluation.errors import CandidateFailed, EngineCrash, EngineError
from specpilot.evaluation.prompts import Prompt, PromptPool
from specpilot.evaluation.server import EngineServer
from specpilot.evaluation.stats import Interval

REGIME = Regime(concurrency=1, output_tokens=19)
SETTINGS = MeasurementSettings(max_pairs=20, min_pairs=4)  # more than a quiet machine needs, for a busy one
FEW = MeasurementSettings(max_pairs=4, min_pairs=4)


@pytest.fixture
def stream(deployment: Deployment) -> Iterator[Prompt]:
    return PromptPool(deployment, deployment.folder / "target", "secret").stream("tuning")


def test_a_against_a_is_no_change(engine, stream) -> None:
    # a level that noise alone does not pass in any number of runs of this suite
    found, legs = compare(engine(commit="aa"), engine(commit="aa"), stream, FEW, 1e-4, regime=REGIME)
    assert found.decision == "null" and found.low < 1 < found.high
    assert len(legs) == 2 * len(found.pairs)
    assert found.base.accepted_length == found.candidate.accepted_length == 3.0


def test_a_known_delay_gives_the_known_ratio(engine, stream) -> None:
    # 24 ms against 12 ms per round: twice as fast, but for what sleeping, sockets and other work add to either
    events: list[PairEvent] = []
    base, candidate = engine(commit="aa", round_s=0.024), engine(commit="bb", round_s=0.012)
    found, legs = compare(base, candidate, stream, SETTINGS, 0.02, regime=REGIME, on_pair=events.append)
    assert found.decision == "gain"
    assert found.ratio > 1.3 and 1.02 <= found.low < found.ratio < found.high
    assert found.end_to_end_ratio > 1.1 and found.machine["decode_saving_seen_end_to_end"] > 0.5
    # what the client's own clock says of every answer, worked out once more
    rates = [leg.generations[0].decoded / leg.generations[0].decode_s for leg in legs]
    assert found.pairs == pytest.approx([b / a for a, b in zip(rates[0::2], rates[1::2], strict=True)])
    assert [event.pair for event in events] == list(range(1, len(found.pairs) + 1))
    assert events[-1].ratio == found.pairs[-1] and events[-1].low == found.low
    assert math.exp(sum(map(math.log, found.pairs)) / len(found.pairs)) == pytest.approx(found.ratio)
    assert Comparison.model_validate_json(found.model_dump_json()) == found


def test_a_comparison_goes_on_until_it_is_told_that_it_is_settled(engine, stream) -> None:
    """Nothing but the rule that was given ends it before its most pairs; the candidate's warm-up is seen before any pair."""
    seen: list[str] = []
    settings = MeasurementSettings(max_pairs=7, min_pairs=2)

    def settled(interval: Interval) -> bool:
        seen.append(f"looked at {interval.n}")
        return interval.n == 5

    def on_warm(leg: Leg) -> None:
        seen.append(f"{leg.side} {len(leg.generations[0].output_ids)}")

    found, _ = compare(
        engine(commit="aa"), engine(commit="bb", round_s=0.001), stream, settings, 0.02, regime=REGIME,
        settled=settled, on_warm=on_warm,
    )  # fmt: skip
    assert len(found.pairs) == 5
    assert seen == ["candidate 19", "looked at 2", "looked at 3", "looked at 4", "looked at 5"]


def test_a_slower_candidate_is_a_loss(engine, stream) -> None:
    base, candidate = engine(commit="aa", round_s=0.012), engine(commit="bb", round_s=0.012, token_s=0.004)
    found, _ = compare(base, candidate, stream, SETTINGS, 0.02, regime=REGIME)
    # 12 ms + 3 tokens of 4 ms each: half the speed
    assert found.decision == "loss" and found.ratio < 0.8 and found.high < 1


def test_pairs_are_abba_on_the_same_fresh_prompts(engine, stream) -> None:
    _, legs = compare(engine(commit="aa"), engine(commit="bb"), stream, FEW, 0.02, regime=REGIME)
    assert [leg.side for leg in legs] == ["base", "candidate"] * 4
    assert [leg.commit for leg in legs] == ["aa", "bb"] * 4
    starts = [leg.generations[0].submitted_s for leg in legs]
    order = [legs[k].side[0] for k in sorted(range(8), key=lambda k: starts[k])]
    assert "".join(order) == "bccbbccb"
    asked = [tuple(leg.generations[0].prompt_ids) for leg in legs]
    assert asked[0::2] == asked[1::2] and len(set(asked)) == 4
    assert all(leg.counters["committed_tokens"] == 18 for leg in legs)


def cpu_seconds(server: EngineServer) -> float:
    """CPU time that the processes of an engine have used so far."""
    return sum(times.user + times.system for p in server.child.processes() for times in [p.cpu_times()])


def test_the_idle_side_is_frozen_while_the_other_is_timed(engine, stream) -> None:
    # The base burns CPU whenever it may; while the candidate is timed it must not.
    base, candidate = engine(commit="aa", idle_burn=True, round_s=0.03), engine(commit="bb", round_s=0.1)
    settings = MeasurementSettings(max_pairs=2, min_pairs=2)
    burned, began = cpu_seconds(base), time.perf_counter()
    found, legs = compare(base, candidate, stream, settings, 0.02, regime=REGIME)
    burned, elapsed = cpu_seconds(base) - burned, time.perf_counter() - began
    timed = sum(leg.wall_s for leg in legs if leg.side == "candidate")
    # One thread of Python burns at most one core: `elapsed` seconds, had it not been stopped for `timed` of them.
    assert 0 < burned < elapsed - timed / 2
    assert len(found.pairs) == 2
    assert {"foreign_cpu_share", "stolen_cpu_share", "warnings", "load_average_1m"} <= set(found.machine)
    assert not base.frozen and not candidate.frozen and candidate.client.healthy()


def test_a_candidate_that_wakes_itself_up_is_caught(engine, stream) -> None:
    base, candidate = engine(commit="aa", round_s=0.03), engine(commit="bb", idle_burn=True)
    over = threading.Event()

    def wake() -> None:
        while not over.is_set():
            os.kill(candidate.child.pid, signal.SIGCONT)
            time.sleep(0.001)

    accomplice = threading.Thread(target=wake, daemon=True)
    accomplice.start()
    try:
        with pytest.raises(CandidateFailed, match="worked while it was stopped|does not stay stopped") as caught:
            compare(base, candidate, stream, FEW, 0.02, regime=REGIME)
    finally:
        over.set()
        accomplice.join()
    assert caught.value.reason is Reason.resource_limit


def test_a_base_pinned_to_fewer_cores_is_caught(engine, stream) -> None:
    base, candidate = engine(commit="aa"), engine(commit="bb")
    for thread in base.scheduled:
        with contextlib.suppress(ProcessLookupError):  # one that served a request and has ended since
            os.setpriority(os.PRIO_PROCESS, thread, 5)
    with pytest.raises(CandidateFailed, match="is scheduled while it was idle") as caught:
        compare(base, candidate, stream, FEW, 0.02, regime=REGIME)
    assert caught.value.reason is Reason.resource_limit


def test_a_base_that_is_slowed_down_between_two_legs_is_caught(engine, stream) -> None:
    base, candidate = engine(commit="aa"), engine(commit="bb")

    def slow(event: PairEvent) -> None:
        if event.pair == 1:  # the candidate answers last in the first pair, and first in the second
            watcher.start()

    def once_frozen() -> None:
        while not base.frozen or candidate.frozen:
            time.sleep(0.0005)
        os.setpriority(os.PRIO_PROCESS, base.child.pid, 5)

    watcher = threading.Thread(target=once_frozen, daemon=True)
    with pytest.raises(CandidateFailed, match="is scheduled while it was idle"):
        compare(base, candidate, stream, FEW, 0.02, regime=REGIME, on_pair=slow)


def test_a_base_that_serves_a_strangers_request_is_caught(engine, stream) -> None:
    base, candidate = engine(commit="aa", round_s=0.01), engine(commit="bb", round_s=0.01)
    stranger = EngineClient(base.client.base_url, 20.0)
    long = threading.Thread(target=lambda: suppress_all(stranger), daemon=True)
    long.start()
    with pytest.raises(CandidateFailed, match="kept busy by somebody else|connections of a stranger") as caught:
        compare(base, candidate, stream, FEW, 0.02, regime=Regime(concurrency=1, output_tokens=91))
    assert caught.value.reason is Reason.resource_limit


def suppress_all(client: EngineClient) -> None:
    """A long answer that its reader never gets to the end of."""
    with contextlib.suppress(EngineError):
        client.generate([7, 8, 9], max_new_tokens=1500)


def test_no_wake_up_shows_the_opening_of_a_prompt_to_come(engine, stream) -> None:
    """It is not timed: an engine that knows the tuning texts would decode the whole answer in it."""
    base, candidate = engine(commit="aa"), engine(commit="bb")
    asked: list[tuple[int, ...]] = []
    generate = candidate.client.generate

    def listen(ids: list[int], **options):
        asked.append(tuple(ids))
        return generate(ids, **options)

    candidate.client.generate = listen
    # Without the chat template, which all prompts share: the code comes first.
    coded = (prompt.model_copy(update={"ids": prompt.ids[prompt.text.index("user\n") + 5 :]}) for prompt in stream)
    compare(base, candidate, coded, FEW, 0.02, regime=REGIME)
    assert (
        len(asked) >= 1 + 2 * 4
    )  # warm-up, then a wake-up and a timed request in each pair, also in one that was disturbed
    for place, (wake, timed) in enumerate(zip(asked[1::2], asked[2::2], strict=True)):
        assert len(wake) <= 16 and not any(later[: len(wake)] == wake for later in asked[2 * place + 2 :])
        assert any(earlier[: len(wake)] == wake for earlier in asked[: 2 * place + 1]), "of a prompt that is over"
        assert len(timed) > 16


def test_stray_work_by_hand() -> None:
    def leg(**counters: float) -> Leg:
        answer = Generation(
            prompt_id="p", prompt_ids=[1] * 100, output_ids=[1] * 20, submitted_s=0.0, first_s=1.0, last_s=2.0,
            first_chunk_tokens=1, claimed_tokens=20, finish_reason="length",
        )  # fmt: skip
        return Leg(
            side="base", commit="", variant="", concurrency=1, generations=[answer], wall_s=2.0, counters=counters
        )

    assert stray_work(leg()) == "" == stray_work(leg(committed_tokens=52, prefill_tokens=132))
    assert "'committed_tokens' grew by 53" in stray_work(leg(committed_tokens=53))
    assert "'prefill_tokens' grew by 133" in stray_work(leg(committed_tokens=19, prefill_tokens=133))


def test_concurrency_above_one(engine, stream) -> None:
    regime = Regime(concurrency=3, output_tokens=19)
    settings = MeasurementSettings(max_pairs=3, min_pairs=3)
    base, candidate = engine(commit="aa", round_s=0.032), engine(commit="bb", round_s=0.016)
    found, legs = compare(base, candidate, stream, settings, 0.05, regime=regime)
    assert found.ratio > 1.2
    assert all(len(leg.generations) == 3 and leg.concurrency == 3 for leg in legs)
    assert found.base.tokens == 57 * len(found.pairs)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"short_by": 3}, Reason.length_mismatch),
        ({"one_chunk": True}, Reason.accounting_mismatch),
        ({"extra_tokens": 3}, Reason.missing_responses),
        ({"drop_after_requests": 2}, Reason.crashed),
        ({"die_after_requests": 2}, Reason.crashed),
        ({"hang_after_tokens": 14}, Reason.timed_out),
    ],
)
def test_a_failing_candidate_is_blamed_with_its_reason(engine, stream, how: dict, reason: Reason) -> None:
    candidate = engine(commit="bb", options={"request_timeout_s": 0.8}, **how)
    base = engine(commit="aa")
    with pytest.raises(CandidateFailed) as caught:
        compare(base, candidate, stream, SETTINGS, 0.02, regime=REGIME)
    assert caught.value.reason is reason
    assert base.client.healthy()


def test_a_failing_base_is_infrastructure_not_a_score(engine, stream) -> None:
    with pytest.raises(EngineCrash):
        compare(engine(commit="aa", die_after_requests=1), engine(commit="bb"), stream, SETTINGS, 0.02, regime=REGIME)


def test_tokens_held_back_are_no_gain(engine, stream) -> None:
    # Everything is decoded before the first token is sent; then tokens rush out: decode looks much faster.
    base, candidate = engine(commit="aa", round_s=0.03), engine(commit="bb", round_s=0.03, hold_back=0.95)
    found, _ = compare(base, candidate, stream, FEW, 0.02, regime=REGIME)
    assert found.ratio > 1.3 and found.decision == "null"
    assert any("before the first token" in words for words in found.machine["warnings"])


def test_speculation_switched_off_is_visible(engine, stream) -> None:
    base = engine(commit="aa")
    candidate = engine(commit="bb", speculation_off=True)
    settings = MeasurementSettings(max_pairs=2, min_pairs=2)
    found, _ = compare(base, candidate, stream, settings, 0.02, regime=REGIME)
    assert found.base.accepted_length == 3.0 and found.candidate.accepted_length == 1.0
    assert found.base.target_forwards_per_token < 0.5 < 0.9 < found.candidate.target_forwards_per_token


def test_the_time_budget_ends_it(engine, stream) -> None:
    settings = MeasurementSettings(max_pairs=50, min_pairs=4, min_effect=1.0)
    found, _ = compare(engine(), engine(), stream, settings, 0.02, regime=REGIME, max_seconds=1.5, noise_sd=0.05)
    assert 4 <= len(found.pairs) < 20
    assert found.machine["noise_from"] == "A/A pairs" and found.detectable > 1.0


def test_the_time_budget_never_cuts_below_the_fewest_pairs(engine, stream) -> None:
    settings = MeasurementSettings(max_pairs=50, min_pairs=5)
    found, _ = compare(engine(), engine(round_s=0.002), stream, settings, 0.02, regime=REGIME, max_seconds=0.001)
    assert len(found.pairs) == 5


def test_disturbed_pairs_are_measured_again_a_few_times(engine, stream, monkeypatch) -> None:
    monkeypatch.setattr("specpilot.evaluation.compare.DISTURBED_SHARE", -1.0)
    settings = MeasurementSettings(max_pairs=6, min_pairs=6)
    found, legs = compare(engine(), engine(), stream, settings, 0.02, regime=REGIME)
    assert found.machine["pairs_repeated"] == 2 and len(found.pairs) == 6 and len(legs) == 12
    monkeypatch.setattr("specpilot.evaluation.compare.DISTURBED_SHARE", 2.0)
    found, _ = compare(engine(), engine(), stream, FEW, 0.02, regime=REGIME)
    assert found.machine["pairs_repeated"] == 0


def test_running_out_of_prompts_is_said_so(engine, stream) -> None:
    few = iter([next(stream) for _ in range(3)])
    with pytest.raises(UsageError, match="ran out of prompts"):
        compare(engine(), engine(), few, SETTINGS, 0.02, regime=REGIME)


@pytest.mark.parametrize(
    ("low", "high", "decided"),
    [
        (0.03, 0.3, True),
        (0.01, 0.3, False),
        (-0.3, -0.05, True),
        (-0.01, 0.01, True),
        (-0.3, 0.01, True),
        (-0.1, 0.1, False),
        (-math.inf, math.inf, False),
    ],
)
def test_when_more_pairs_would_change_nothing(low: float, high: float, decided: bool) -> None:
    assert is_decided(Interval(mean=0.0, low=low, high=high, n=5), 1.02) is decided


def test_saving_seen_end_to_end_by_hand() -> None:
    def leg(first: float, last: float) -> list[Leg]:
        answer = Generation(
            prompt_id="p", prompt_ids=[1], output_ids=[1, 2], submitted_s=0.0, first_s=first, last_s=last,
            first_chunk_tokens=1, claimed_tokens=2, finish_reason="length",
        )  # fmt: skip
        return [Leg(side="x", commit="", variant="", concurrency=1, generations=[answer], wall_s=last, counters={})]

    assert seen_end_to_end(leg(1, 11), leg(1, 6)) == pytest.approx(1.0)
    assert seen_end_to_end(leg(1, 11), leg(6, 11)) == pytest.approx(0.0)
    assert seen_end_to_end(leg(1, 11), leg(1, 12)) is None
