"""Speculative decoding commits exactly what autoregressive decoding commits, and counts it rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
from slim_engine.counters import COUNTERS
from slim_engine.loading import Loaded
from slim_engine.ngram import NgramDrafter
from slim_engine.policy import Policy
from slim_engine.request import Chunk, Request
from slim_engine.sampling import SamplingParams, accept_greedy

from tests.engines.slim.support import PlannedDrafter, engine, run
from tests.helpers.tiny_model import VOCAB, make_tiny_drafter

PROMPTS = [[7, 9, 11, 200, 31], [50] * 12, list(range(100, 140)), [251], [5, 6, 7, 5, 6, 7, 5, 6]]


def _planned(loaded: Loaded, truth: list[Request], plan: list[int], drafts: int = 7) -> Loaded:
    loaded.models.drafter = PlannedDrafter(
        {tuple(r.prompt_ids): list(r.output_ids) for r in truth}, plan, drafts, VOCAB
    )
    loaded.models.policy = Policy(drafts, drafts)
    COUNTERS.reset()
    return loaded


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["dflash", "dflash trimmed", "ngram"])
def test_speculative_equals_autoregressive(
    request: pytest.FixtureRequest, tmp_path: Path, architecture: str, method: str
) -> None:
    folder = request.getfixturevalue(architecture)
    want = [r.output_ids for r in run(engine(folder), PROMPTS, max_new_tokens=60, ignore_eos=True)]
    drafter: Path | str = "ngram" if method == "ngram" else make_tiny_drafter(tmp_path / "d", folder)
    loaded = engine(folder, drafter, ngram_min=1, draft_only_verified=method.endswith("trimmed"))
    together = [r.output_ids for r in run(loaded, PROMPTS, max_new_tokens=60, ignore_eos=True)]
    alone = [run(loaded, [p], max_new_tokens=60, ignore_eos=True)[0].output_ids for p in PROMPTS]
    assert together == want
    assert alone == want
    assert COUNTERS.get("drafted_tokens") > 0


@pytest.mark.parametrize(
    ("plan", "rounds"),
    [([7], [8, 8, 8, 8, 8, 1]), ([0], [1] * 41), ([3, 0, 5], [4, 1, 6, 4, 1, 6, 4, 1, 6, 4, 1, 3])],
)
def test_accepted_lengths_follow_the_plan(llama: Path, plan: list[int], rounds: list[int]) -> None:
    """The first token comes with prefill; 41 more in rounds of (right drafts + bonus), the last round cut to what remains."""
    loaded = engine(llama)
    truth = run(loaded, PROMPTS[:1], max_new_tokens=42, ignore_eos=True)
    chunks: list[Chunk] = []
    got = run(_planned(loaded, truth, plan), PROMPTS[:1], chunks=chunks, max_new_tokens=42, ignore_eos=True)[0]
    assert got.output_ids == truth[0].output_ids
    assert [len(c.token_ids) for c in chunks] == [1, *rounds]
    assert (got.rounds, got.committed) == (len(rounds), 41)
    assert COUNTERS.get("rounds") == COUNTERS.get("target_forwards") == len(rounds)
    assert COUNTERS.get("committed_tokens") == 41
    assert COUNTERS.get("accepted_drafts") == 41 - len(rounds)


def test_no_draft_is_made_that_could_not_be_committed(llama: Path) -> None:
    loaded = engine(llama)
    truth = run(loaded, PROMPTS[:1], max_new_tokens=10, ignore_eos=True)
    run(_planned(loaded, truth, [7]), PROMPTS[:1], max_new_tokens=10, ignore_eos=True)
    assert (
        COUNTERS.get("drafted_tokens") == 7
    )  # 8 committed by round one, then one token remains: its round drafts nothing
    assert COUNTERS.get("target_rows") == 9


@pytest.mark.parametrize("right", [0, 2, 7])
def test_eos_inside_an_accepted_run_ends_the_request(llama: Path, right: int) -> None:
    loaded = engine(llama)
    truth = run(loaded, PROMPTS[:1], max_new_tokens=30, ignore_eos=True)
    output = truth[0].output_ids
    at = next(i for i in range(3, 30) if output[i] not in output[:i])
    stop = frozenset([output[at]])
    got = run(_planned(loaded, truth, [right]), PROMPTS[:1], max_new_tokens=30, ignore_eos=True, stop_token_ids=stop)[0]
    assert got.output_ids == output[: at + 1]
    assert got.finish == {"type": "stop", "matched": output[at]}
    assert COUNTERS.get("committed_tokens") == at


def test_eos_stops_unless_ignored(llama: Path) -> None:
    loaded = engine(llama)
    output = run(loaded, PROMPTS[:1], max_new_tokens=20, ignore_eos=True)[0].output_ids
    at = next(i for i in range(20) if output[i] not in output[:i] and i > 4)
    request = Request("r", PROMPTS[0], SamplingParams(max_new_tokens=20), (output[at],), lambda c: None)
    assert request.commit(output) == output[: at + 1]
    request = Request(
        "r", PROMPTS[0], SamplingParams(max_new_tokens=20, ignore_eos=True), (output[at],), lambda c: None
    )
    assert request.commit(output) == output
    assert request.finish == {"type": "length", "length": 20}


@pytest.mark.parametrize("right", [0, 7])
def test_stop_string_across_tokens(llama: Path, right: int) -> None:
    """The tokenizer has one token per byte, so a stop string of three bytes spans tokens, and may end inside an accepted run."""
    loaded = engine(llama)
    from slim_engine.text import TextCodec

    codec = TextCodec(llama)
    prompt = PROMPTS[2]
    truth = run(loaded, [prompt], max_new_tokens=60, ignore_eos=True)
    output = truth[0].output_ids
    at = next(
        i
        for i in range(4, 50)
        if codec.decode(output[i : i + 2]).isascii() and len(codec.decode(output[i : i + 2])) == 2
    )
    stop = codec.decode(output[at : at + 2])
    end = next(i for i in range(1, 61) if stop in codec.decode(output[:i]))
    got = run(_planned(loaded, truth, [right]), [prompt], max_new_tokens=60, ignore_eos=True, stop=(stop,))[0]
    assert got.output_ids == output[:end]
    assert got.finish == {"type": "stop", "matched": stop}


def test_requests_of_different_lengths_share_rounds(llama: Path, drafter: Path) -> None:
    """More requests than slots, different prompts: each gets what it gets alone."""
    loaded = engine(llama, drafter, max_requests=2, prefill_chunk=16)
    want = {i: run(loaded, [p], max_new_tokens=25, ignore_eos=True)[0].output_ids for i, p in enumerate(PROMPTS)}
    COUNTERS.reset()
    got = run(loaded, PROMPTS, max_new_tokens=25, ignore_eos=True)
    assert {i: r.output_ids for i, r in enumerate(got)} == want
    assert COUNTERS.get("round_batches") < COUNTERS.get("rounds")
    assert COUNTERS.get("requests") == len(PROMPTS)


def test_verify_drafts_limits_the_rows(llama: Path, drafter: Path) -> None:
    run(engine(llama, drafter, verify_drafts=2), PROMPTS[:1], max_new_tokens=20, ignore_eos=True)
    assert COUNTERS.get("drafted_tokens") <= 2 * COUNTERS.get("rounds")
    assert COUNTERS.get("target_rows") == COUNTERS.get("drafted_tokens") + COUNTERS.get("rounds")


@pytest.mark.parametrize("tokens", [1, 2])
def test_shortest_outputs(llama: Path, drafter: Path, tokens: int) -> None:
    got = run(engine(llama, drafter), PROMPTS[:1], max_new_tokens=tokens, ignore_eos=True)[0]
    assert len(got.output_ids) == tokens
    assert got.rounds == tokens - 1
    assert COUNTERS.get("draft_forwards") == 0  # the last token needs no draft


@pytest.mark.parametrize(
    ("drafts", "best", "want"),
    [([], [4], [4]), ([1, 2], [1, 2, 3], [1, 2, 3]), ([1, 2], [9, 2, 3], [9]), ([1, 9], [1, 2, 3], [1, 2])],
)
def test_accept_greedy(drafts: list[int], best: list[int], want: list[int]) -> None:
    assert accept_greedy(drafts, best) == want


def test_ngram_takes_the_longest_and_latest_match() -> None:
    drafter = NgramDrafter(1, 3, 4)
    request = Request("r", [1, 2, 3, 40, 9, 2, 3, 50, 51, 1, 2], SamplingParams(), (), lambda c: None)
    drafter.start(request)
    request.output_ids.append(3)  # suffix 1 2 3: seen at the start; 2 3 alone was last followed by 50
    assert drafter.propose([request], [4])[0].tokens == [40, 9, 2, 3]
    request.output_ids.append(77)  # never seen
    assert drafter.propose([request], [4])[0].tokens == []
    request.output_ids += [2, 3]
    assert drafter.propose([request], [2])[0].tokens == [77, 2]  # the latest 2 3, not the first
    assert drafter.propose([request], [0])[0].tokens == []
