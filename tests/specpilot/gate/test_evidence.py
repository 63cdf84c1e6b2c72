"""Accounting, lengths, timing, engagement and replay on hand-made evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specpilot.contracts import Comparison, SideSummary
from specpilot.evaluation.prompts import Prompt
from specpilot.gate import accounting, engagement, lengths, timing
from specpilot.gate.hidden import eos_token_ids, near_copy, served_block_size, vocab_size
from specpilot.gate.records import GatePolicy, ReplayProbe, TimeFloor
from specpilot.gate.replay import check_replay

from .builders import claim, generation, leg

EOS = {0}


# -- accounting


def test_a_counter_that_the_engine_never_heard_of_is_named() -> None:
    warm = leg([generation([1, 2])])
    assert engagement.check_counters_exist(claim(counters=["rounds"]), warm).passed
    assert engagement.check_counters_exist(claim(counters=[]), warm).passed
    misspelt = engagement.check_counters_exist(claim(counters=["rounds", "fast_pth"]), warm)
    assert not misspelt.passed and "no counter 'fast_pth'" in misspelt.detail and "round_batches" in misspelt.detail
    still = warm.model_copy(update={"counters": {"rounds": 0.0}})
    assert engagement.check_counters_exist(claim(counters=["rounds"]), still).passed, "rare is not unknown"


def test_claimed_tokens_must_equal_counted_ids() -> None:
    assert accounting.check_claimed_tokens([generation([1, 2])]).passed
    assert not accounting.check_claimed_tokens([generation([1, 2]), generation([1, 2], claimed_tokens=3)]).passed
    assert not accounting.check_claimed_tokens([generation([1, 2], claimed_tokens=-1)]).passed


@pytest.mark.parametrize(
    ("tokens", "rounds", "block", "possible"),
    [
        (17, 2, 8, True),  # one from prefill, 16 in two full rounds
        (17, 1, 8, False),
        (18, 2, 8, False),  # 17 need three
        (18, 3, 8, True),
        (4, 3, 1, True),
        (4, 4, 1, True),
        (4, 5, 1, False),  # a round commits at least one
        (1, 0, 8, True),
        (0, 0, 8, True),
    ],
)
def test_claimed_rounds_must_be_possible(tokens: int, rounds: int, block: int, possible: bool) -> None:
    assert accounting.check_rounds([generation(list(range(tokens)), rounds=rounds)], block).passed is possible


def test_answers_without_rounds_are_not_judged_by_them() -> None:
    assert accounting.check_rounds([generation([1, 2, 3], rounds=None)], 8).passed


def test_committed_counter_near_the_count() -> None:
    good = leg([generation([1, 2, 3, 4])])
    assert accounting.check_committed(good, 8).passed
    for grown, passed in ((2, False), (3, True), (12, True), (13, False)):
        assert (
            accounting.check_committed(good.model_copy(update={"counters": {"committed_tokens": grown}}), 8).passed
            is passed
        )
    assert accounting.check_committed(good.model_copy(update={"counters": {}}), 8).passed


def test_first_chunk_of_a_round_and_no_more() -> None:
    assert accounting.check_first_chunk([generation(list(range(20)), first_chunk_tokens=9)], 8).passed
    assert not accounting.check_first_chunk([generation(list(range(20)), first_chunk_tokens=10)], 8).passed


# -- lengths


def test_every_prompt_answered_once() -> None:
    one, two = generation([1], "p1"), generation([1], "p2")
    assert lengths.check_answered(["p1", "p2"], [two, one]).passed
    assert not lengths.check_answered(["p1", "p2"], [one]).passed
    assert not lengths.check_answered(["p1"], [one, one]).passed
    assert not lengths.check_answered(["p1"], [one, two]).passed
    assert not lengths.check_answered(["p1"], [generation([], "p1")]).passed


def test_fixed_length() -> None:
    assert lengths.check_fixed_length([generation([1, 2, 3])], 3).passed
    assert not lengths.check_fixed_length([generation([1, 2])], 3).passed
    assert not lengths.check_fixed_length([generation([1, 2, 3], finish_reason="stop")], 3).passed


def test_paired_lengths() -> None:
    base = leg([generation([1, 2], "p1"), generation([1, 2], "p2")], "base")
    assert lengths.check_same_lengths(base, leg([generation([3, 4], "p1"), generation([5, 6], "p2")])).passed
    check = lengths.check_same_lengths(base, leg([generation([3, 4], "p1"), generation([5], "p2")]))
    assert not check.passed
    assert "p2: base 2, candidate 1" in check.detail


@pytest.mark.parametrize(
    ("output", "finish", "fault"),
    [
        ([5, 6, 0], "stop", ""),
        ([0], "stop", ""),
        ([5, 6, 7, 8], "length", ""),
        ([5, 6, 7, 0], "length", ""),  # the limit and the stop token fall together
        ([5, 6, 7, 0], "stop", ""),
        ([5, 0, 6, 0], "stop", "goes on after the stop token at position 1"),
        ([0, 5, 6, 7], "length", "goes on after the stop token at position 0"),
        ([5, 6], "stop", "no stop token"),
        ([], "stop", "no stop token"),
        ([5, 6], "length", "after 2 of 4"),
        ([5, 0], "length", "says 'length'"),
        ([5, 6, 7, 8, 9], "length", "after 5 of 4"),
        ([5, 0], "abort", "unknown finish reason"),
    ],
)
def test_stop_rules(output: list[int], finish: str, fault: str) -> None:
    found = lengths.stop_fault(generation(output, finish_reason=finish), 4, EOS)
    assert (fault in found) if fault else found == ""


# -- timing


def test_rounds_after_the_first_chunk() -> None:
    # 17 tokens, one in the first chunk: 16 left at block 8 are two rounds at least.
    assert timing.rounds_after_first(generation(list(range(17)), rounds=None), 8) == 2
    # 10 claimed rounds over 17 tokens: 16/17 of them, less one of doubt.
    assert timing.rounds_after_first(generation(list(range(17)), rounds=10), 8) == 8
    assert timing.rounds_after_first(generation([1], rounds=0), 8) == 0


def test_floor_with_slack() -> None:
    floor = TimeFloor(round_s=0.010)
    # 16 decoded tokens at block 8: 2 rounds, 20 ms; 10 % slack allows down to 18.18 ms.
    fast = generation(list(range(17)), rounds=None, last_s=1.0 + 0.0183)
    assert timing.check_possible([fast], 8, floor, 0.10).passed
    faster = fast.model_copy(update={"last_s": 1.0 + 0.0181})
    assert not timing.check_possible([faster], 8, floor, 0.10).passed
    assert timing.check_possible([faster], 8, None, 0.10).passed


def test_time_runs_forward() -> None:
    assert not timing.check_possible([generation([1, 2], first_s=0.5)], 8, None, 0.1).passed
    assert not timing.check_possible([generation([1, 2], last_s=0.95)], 8, None, 0.1).passed


def comparison(**changes: Any) -> Comparison:
    side = SideSummary(
        commit="b0",
        variant="final",
        decode_tokens_per_s=50,
        end_to_end_tokens_per_s=40,
        ttft_s=0.1,
        accepted_length=3.0,
        target_forwards_per_token=0.3,
        startup_s=4.0,
        tokens=100,
    )
    values: dict[str, Any] = {
        "base": side,
        "candidate": side.model_copy(update={"commit": "c1"}),
        "ratio": 1.3,
        "low": 1.2,
        "high": 1.4,
        "end_to_end_ratio": 1.2,
        "end_to_end_low": 1.1,
        "end_to_end_high": 1.3,
        "alpha": 0.05,
        "pairs": [1.3, 1.3],
        "detectable": 1.05,
        "decision": "gain",
        "seconds": 10.0,
    }
    return Comparison(**(values | changes))


def test_decode_gain_paid_for_before_the_first_token() -> None:
    assert timing.check_end_to_end(comparison()).passed
    lost = {"end_to_end_ratio": 0.8, "end_to_end_low": 0.7, "end_to_end_high": 0.9}
    assert not timing.check_end_to_end(comparison(**lost)).passed
    # No decode gain: nothing was moved, the measurement itself says loss.
    assert timing.check_end_to_end(comparison(**lost, ratio=0.9, low=0.8, high=1.0)).passed


def test_startup_bound() -> None:
    policy = GatePolicy(startup_factor=2.0, startup_slack_s=10.0)
    assert timing.check_startup(4.0, 18.0, policy).passed
    assert not timing.check_startup(4.0, 18.1, policy).passed


def test_requests_in_flight() -> None:
    together = [generation([1, 2], f"p{i}", first_s=1.0, last_s=2.0) for i in range(4)]
    in_turn = [generation([1, 2], f"p{i}", submitted_s=0.9, first_s=1.0 + i, last_s=1.9 + i) for i in range(4)]
    assert timing.in_flight(leg(together, concurrency=4)) == pytest.approx(4.0)
    assert timing.in_flight(leg(in_turn, concurrency=4)) == pytest.approx(1.0)
    assert timing.check_admission(leg(together, concurrency=4), 4, 0.5).passed
    assert not timing.check_admission(leg(in_turn, concurrency=4), 4, 0.5).passed
    assert timing.check_admission(
        leg(in_turn, concurrency=4), 1, 0.5
    ).passed  # the engine serves one at a time by design
    assert timing.check_admission(leg(in_turn), 4, 0.5).passed
    # two requests at a time overlap less the faster they are answered: no queue shows there
    assert timing.check_admission(leg(in_turn, concurrency=2), 1.13, 0.3).passed
    assert timing.check_admission(leg(in_turn, concurrency=4), 3.2, 0.3).passed
    assert not timing.check_admission(leg(in_turn, concurrency=4), 3.6, 0.3).passed
    # at 64 an engine that serves two at once is held to what its base shows, not to four
    many = [generation([1, 2], f"p{i}", first_s=1.0 + i // 2, last_s=2.0 + i // 2) for i in range(64)]
    assert timing.in_flight(leg(many, concurrency=64)) == pytest.approx(2.0)
    assert not timing.check_admission(leg(many, concurrency=64), 60.0, 0.3).passed
    assert timing.check_admission(leg(many, concurrency=64), 2.2, 0.3).passed


# -- engagement


def legs_with(*grown: dict[str, float]) -> list[Any]:
    return [leg([generation([1, 2, 3, 4])], counters={"round_batches": 10.0, **g}) for g in grown]


def test_claimed_counter_grows_in_every_leg_and_in_proportion() -> None:
    wants = claim(counters=["native_calls"])
    assert engagement.check_engaged(wants, legs_with({"native_calls": 5}, {"native_calls": 5}), 0.5).passed
    assert not engagement.check_engaged(wants, legs_with({"native_calls": 100}, {"native_calls": 0}), 0.5).passed
    assert not engagement.check_engaged(wants, legs_with({"native_calls": 5}, {"native_calls": 4}), 0.5).passed
    assert "does not exist" in engagement.check_engaged(wants, legs_with({}), 0.5).detail
    assert engagement.check_engaged(claim(), legs_with({}), 0.5).passed


def test_fallback_counters_must_stand_still() -> None:
    forbids = claim(forbidden_counters=["slow_path"])
    assert engagement.check_no_fallback(forbids, legs_with({"slow_path": 0})).passed
    assert not engagement.check_no_fallback(forbids, legs_with({"slow_path": 0}, {"slow_path": 1})).passed
    assert not engagement.check_no_fallback(claim(), legs_with({"head_fallbacks": 2})).passed
    assert "no counter slow_path" in engagement.check_no_fallback(forbids, legs_with({})).detail


def test_speculation_switched_off_is_seen_unless_it_is_said() -> None:
    base = [leg([generation(list(range(13)), rounds=4)], "base")]  # 12 tokens in 4 rounds: 3.0
    off = [leg([generation(list(range(13)), rounds=12)])]  # 1.0
    on = [leg([generation(list(range(13)), rounds=5)])]  # 2.4
    assert engagement.check_speculation(claim(), base, on, 1.05).passed
    check = engagement.check_speculation(claim(), base, off, 1.05)
    assert not check.passed
    assert "3.00 -> 1.00" in check.detail
    assert engagement.check_speculation(claim(hypothesis="Speculation off pays at batch 64"), base, off, 1.05).passed
    assert engagement.check_speculation(claim(), off, off, 1.05).passed  # the base does not speculate either


# -- replay


def probe(again_s: float, rounds: int = 10, copy_s: float = 2.0) -> ReplayProbe:
    def one(seconds: float, rounds: int) -> Any:
        return generation(list(range(20)), submitted_s=0.0, first_s=0.0, last_s=seconds, rounds=rounds)

    return ReplayProbe(fresh=[one(2.0, 10), one(copy_s, 10)], repeated=[one(again_s, rounds), one(again_s, rounds)])


def test_a_stored_answer_is_too_fast_or_needs_too_few_rounds() -> None:
    policy = GatePolicy(replay_speedup=3.0, replay_rounds=0.7)
    assert check_replay(probe(2.0), policy).passed
    assert check_replay(probe(0.7), policy).passed
    assert not check_replay(probe(0.6), policy).passed
    assert check_replay(probe(2.0, copy_s=0.6), policy).passed  # another answer, another accepted length
    assert check_replay(probe(2.0, rounds=7), policy).passed
    assert not check_replay(probe(2.0, rounds=6), policy).passed


def test_stated_block_size_is_believed_within_reason() -> None:
    assert served_block_size({"drafter": {"block_size": 8}}) == 8
    assert served_block_size({"drafter": {"block_size": 4000}}) == 32
    for stated in (None, 0, -3, True, "8"):
        assert served_block_size({"drafter": {"block_size": stated}}) == 1
    assert served_block_size({}) == 1


def test_near_copy_swaps_two_tokens_and_keeps_the_rest() -> None:
    prompt = Prompt(id="p", source="s", text="t", ids=[1, 2, 3, 3, 4, 5, 6])
    copy = near_copy(prompt)
    assert copy.ids == [1, 2, 3, 4, 3, 5, 6]
    assert near_copy(prompt, 0.6).ids == [1, 2, 3, 3, 5, 4, 6]
    assert prompt.ids == [1, 2, 3, 3, 4, 5, 6]
    assert copy.id != prompt.id
    assert near_copy(prompt.model_copy(update={"ids": [7, 7, 7]})).ids == [7, 7, 7]


def test_stop_tokens_of_a_checkpoint(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_token_ids(tmp_path) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert eos_token_ids(tmp_path) == [2, 7]
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert eos_token_ids(tmp_path) == [2, 7]


@pytest.mark.parametrize(
    ("config", "found"),
    [('{"vocab_size": 7}', 7), ('{"text_config": {"vocab_size": 8}}', 8), ("{}", None), ('{"vocab_size": "7"}', None)],
)
def test_vocabulary_of_a_checkpoint(tmp_path: Path, config: str, found: int | None) -> None:
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text(config)
    assert vocab_size(tmp_path) == found
