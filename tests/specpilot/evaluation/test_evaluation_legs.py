"""Legs: all answered or nothing, counted and timed here."""

from __future__ import annotations

import itertools

import pytest

from specpilot.contracts import Generation, Leg
from specpilot.deployment import Regime
from specpilot.evaluation import legs as arithmetic
from specpilot.evaluation.errors import EngineCrash, ShortAnswer, UnstreamedAnswer, WrongIdentity
from specpilot.evaluation.legs import require_full, run_leg
from specpilot.evaluation.prompts import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=f"p{k}", source="x", text="", ids=[k, 1, 2, 3]) for k in range(n)]


def made(concurrency: int = 1, rounds: int | None = 4) -> Leg:
    """Two answers of ten tokens: 1 s prefill each, then 9 tokens in 3 s; back to back at concurrency 1."""
    shift = 4.0 if concurrency == 1 else 0.5
    answers = [
        Generation(
            prompt_id=str(k), prompt_ids=[1], output_ids=list(range(10)), submitted_s=k * shift, first_s=k * shift + 1,
            last_s=k * shift + 4, first_chunk_tokens=1, claimed_tokens=10, finish_reason="length", rounds=rounds,
        )
        for k in range(2)
    ]  # fmt: skip
    return Leg(
        side="base", commit="aa", variant="stock", concurrency=concurrency, generations=answers, wall_s=8.0, counters={}
    )


def test_rates_by_hand() -> None:
    one, two = made(1), made(2)
    assert arithmetic.decode_rate(one) == pytest.approx(18 / 6)
    assert arithmetic.end_to_end_rate(one) == pytest.approx(20 / 8)
    assert arithmetic.decode_rate(two) == pytest.approx(18 / 3.5)
    assert arithmetic.end_to_end_rate(two) == pytest.approx(20 / 4.5)
    assert arithmetic.ttft_s([one, two]) == pytest.approx(1.0)
    assert arithmetic.accepted_length([one]) == pytest.approx(9 / 4)
    assert arithmetic.accepted_length([made(rounds=None)]) is None
    assert arithmetic.accepted_length([]) is None


def test_leg_against_a_real_process(engine) -> None:
    server = engine(counters={"fast_path": 1})
    leg = run_leg(server, prompts(3), concurrency=1, max_new_tokens=10, side="candidate")
    assert [g.prompt_id for g in leg.generations] == ["p0", "p1", "p2"]
    assert leg.counters["committed_tokens"] == 27 and leg.counters["fast_path"] == leg.counters["rounds"] == 9
    assert (leg.side, leg.commit, leg.variant) == ("candidate", "aa", "stock")
    summary = arithmetic.summarise(server, [leg])
    assert summary.accepted_length == 3.0 and summary.tokens == 30
    assert summary.target_forwards_per_token == pytest.approx(12 / 30)
    # nine rounds of 6 ms for 27 tokens: at most 500 tokens/s, on a busy machine any fewer
    assert 0 < summary.decode_tokens_per_s <= 500
    # counters are growth, not totals
    again = run_leg(server, prompts(1), concurrency=1, max_new_tokens=10, side="candidate")
    assert again.counters["rounds"] == 3


def test_concurrency_overlaps_requests(engine) -> None:
    server = engine(round_s=0.2)  # an answer takes 0.6 s: the others are asked meanwhile, however busy the machine
    leg = run_leg(server, prompts(3), concurrency=3, max_new_tokens=10, side="base")
    alone = run_leg(server, prompts(3), concurrency=1, max_new_tokens=10, side="base")
    assert [g.output_ids for g in leg.generations] == [g.output_ids for g in alone.generations]
    assert [g.prompt_id for g in leg.generations] == ["p0", "p1", "p2"]
    starts, ends = [g.submitted_s for g in leg.generations], [g.last_s for g in leg.generations]
    assert max(starts) < min(ends)
    for before, after in itertools.pairwise(alone.generations):
        assert before.last_s <= after.submitted_s


@pytest.mark.parametrize("concurrency", [1, 3])
def test_one_dropped_request_fails_the_whole_leg(engine, concurrency: int) -> None:
    server = engine(drop_after_requests=2)
    with pytest.raises(EngineCrash):
        run_leg(server, prompts(3), concurrency=concurrency, max_new_tokens=4, side="base")


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [({"short_by": 1}, ShortAnswer, "9 tokens, asked for 10"), ({"one_chunk": True}, UnstreamedAnswer, "one chunk")],
)
def test_answers_that_cannot_be_timed(engine, how: dict, error: type[Exception], words: str) -> None:
    leg = run_leg(engine(**how), prompts(1), concurrency=1, max_new_tokens=10, side="candidate")
    with pytest.raises(error, match=words):
        require_full(leg, 10)


def test_every_leg_checks_who_answers(engine) -> None:
    base, candidate = engine(commit="aa"), engine(commit="bb")
    base._client, candidate._client = candidate._client, base._client
    for server in (base, candidate):
        with pytest.raises(WrongIdentity, match="commit is"):
            run_leg(server, prompts(1), concurrency=1, max_new_tokens=4, side="base")


def test_a_leg_needs_prompts(engine) -> None:
    server = engine()
    for bad in ({"prompts": [], "concurrency": 1}, {"prompts": prompts(1), "concurrency": 0}):
        with pytest.raises(ValueError, match="at least"):
            run_leg(server, max_new_tokens=4, side="base", **bad)


def test_the_deployments_load_reaches_every_request(engine, monkeypatch) -> None:
    server = engine(round_s=0.2)
    asked: list[tuple[float, int | None]] = []
    generate = server.client.generate

    def listen(ids, **options):
        asked.append((options["temperature"], options["seed"]))
        return generate(ids, **options)

    monkeypatch.setattr(server.client, "generate", listen)
    load = Regime(concurrency=2, output_tokens=64, temperature=0.7)
    leg = arithmetic.run_under_load(server, prompts(2), load, 10, "base", seed=3)
    assert asked == [(0.7, 3), (0.7, 3)]
    assert (leg.side, leg.concurrency) == ("base", 2) and [len(g.output_ids) for g in leg.generations] == [10, 10]
    assert max(g.submitted_s for g in leg.generations) < min(g.last_s for g in leg.generations), "two at a time"
