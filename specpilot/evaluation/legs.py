"""One leg: a list of prompts answered by one engine at one concurrency, and the figures that follow from it.

All prompts are answered or the leg fails; there is no partial leg. Counters are read before and after, so
that what ran in the timed part can be proved from the timed part. The arithmetic uses only times of our clock
and token ids that we received.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from specpilot.contracts import Generation, Leg, SideSummary
from specpilot.deployment import Regime
from specpilot.evaluation.errors import ShortAnswer, UnstreamedAnswer
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer


def run_leg(
    server: EngineServer,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    side: str,
    ignore_eos: bool = True,
    seed: int | None = None,
    timeout_s: float | None = None,
) -> Leg:
    """Answers every prompt with at most `concurrency` in flight; generations come in the prompts' order.

    Raises the EngineError of the first request that failed (the others are given up with it), and WrongIdentity when
    another engine answers than the one that was started.
    """
    if concurrency < 1 or not prompts:
        raise ValueError("a leg needs at least one prompt and concurrency of at least 1")
    client = server.client

    def ask(prompt: Prompt) -> Generation:
        return client.generate(
            prompt.ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            seed=seed,
            prompt_id=prompt.id,
            timeout_s=timeout_s,
        )

    before = server.stated_counters()
    began = time.perf_counter()
    generations = [ask(prompt) for prompt in prompts] if concurrency == 1 else _together(ask, prompts, concurrency)
    wall = time.perf_counter() - began
    after = server.stated_counters()
    return Leg(
        side=side,
        commit=server.commit,
        variant=server.variant,
        concurrency=concurrency,
        generations=generations,
        wall_s=wall,
        counters={name: value - before.get(name, 0.0) for name, value in after.items()},
    )


def run_under_load(
    server: EngineServer,
    prompts: Sequence[Prompt],
    load: Regime,
    max_new_tokens: int,
    side: str,
    seed: int | None = None,
) -> Leg:
    """`run_leg` under a deployment's load: its number of requests at a time, its temperature. Whatever is timed or profiled is."""
    return run_leg(
        server,
        prompts,
        concurrency=load.concurrency,
        max_new_tokens=max_new_tokens,
        temperature=load.temperature,
        side=side,
        seed=seed,
    )


def _together(ask: Callable[[Prompt], Generation], prompts: Sequence[Prompt], concurrency: int) -> list[Generation]:
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        futures: list[Future[Generation]] = [pool.submit(ask, prompt) for prompt in prompts]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()
        return [future.result() for future in futures]


def require_full(leg: Leg, max_new_tokens: int) -> None:
    """Refuses a timed leg whose answers cannot be timed: wrong number of tokens, or all of them at once."""
    for generation in leg.generations:
        count = len(generation.output_ids)
        if count != max_new_tokens:
            raise ShortAnswer(
                f"{leg.side} {leg.commit[:12]} answered {generation.prompt_id} with {count} tokens, asked for {max_new_tokens}",
                "timed requests ignore EOS and have a fixed length",
            )
        if max_new_tokens > 1 and (generation.decoded < 1 or generation.decode_s <= 0.0):
            raise UnstreamedAnswer(
                f"{leg.side} {leg.commit[:12]} sent all {count} tokens of {generation.prompt_id} in one chunk",
                "stream tokens as they are committed",
            )


def decode_seconds(leg: Leg) -> float:
    """Seconds from the first token of any request to the end of the last one. Gaps between requests of a
    concurrency-1 leg (prefill) are left out."""
    if leg.concurrency == 1:
        return sum(generation.decode_s for generation in leg.generations)
    return max(g.last_s for g in leg.generations) - min(g.first_s for g in leg.generations)


def decode_rate(leg: Leg) -> float:
    """Decode tokens per second: tokens after each first chunk over `decode_seconds`."""
    return sum(generation.decoded for generation in leg.generations) / decode_seconds(leg)


def end_to_end_seconds(leg: Leg) -> float:
    """Seconds from the first submission to the last answer's end."""
    return max(g.last_s for g in leg.generations) - min(g.submitted_s for g in leg.generations)


def end_to_end_rate(leg: Leg) -> float:
    """All output tokens per second of the leg, prefill and waiting included."""
    return tokens_of(leg) / end_to_end_seconds(leg)


def tokens_of(leg: Leg) -> int:
    """Output tokens that we received."""
    return sum(len(generation.output_ids) for generation in leg.generations)


def ttft_s(legs: Sequence[Leg]) -> float:
    """Median seconds from submission to the first token."""
    return statistics.median(g.first_s - g.submitted_s for leg in legs for g in leg.generations)


def accepted_length(legs: Sequence[Leg]) -> float | None:
    """Committed tokens per decode round, bonus included: tokens received, less the one that prefill gives, over
    the rounds that the engine states (it can only flatter itself by understating rounds; no score uses it)."""
    answers = [g for leg in legs for g in leg.generations]
    rounds = [g.rounds for g in answers if g.rounds]
    if not answers or len(rounds) != len(answers):
        return None
    return sum(max(0, len(g.output_ids) - 1) for g in answers) / sum(rounds)


def summarise(server: EngineServer, legs: Sequence[Leg]) -> SideSummary:
    """One engine over all its legs; rates are totals over totals."""
    tokens = sum(tokens_of(leg) for leg in legs)
    decoded = sum(g.decoded for leg in legs for g in leg.generations)
    forwards = sum(leg.counters.get("target_forwards", 0.0) for leg in legs)
    return SideSummary(
        commit=server.commit,
        variant=server.variant,
        decode_tokens_per_s=decoded / sum(decode_seconds(leg) for leg in legs),
        end_to_end_tokens_per_s=tokens / sum(end_to_end_seconds(leg) for leg in legs),
        ttft_s=ttft_s(legs),
        accepted_length=accepted_length(legs),
        target_forwards_per_token=forwards / tokens if forwards and tokens else None,
        startup_s=server.startup_s,
        tokens=tokens,
    )
