"""Candidate against base: interleaved, paired, stopped as soon as the answer is known.

Both engines are up; the one that is not timed is frozen. Every pair sends the same fresh prompts to both sides, in the
order A B, B A, A B, ... so that drift of the machine cancels. After each pair the confidence sequence is looked
at; it stays valid under that peeking. Failures of the candidate become `CandidateFailed`, failures of the base stay
`EngineError`: infrastructure, never a score.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specpilot.contracts import Comparison, Leg, Record
from specpilot.deployment import MeasurementSettings, Regime
from specpilot.errors import UsageError
from specpilot.evaluation import legs as figures
from specpilot.evaluation.callers import require_uncalled
from specpilot.evaluation.errors import LimitExceeded, blame_candidate
from specpilot.evaluation.lease import CpuWatch, DeviceLease, other_engines
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer, Scheduling
from specpilot.evaluation.stats import Interval, confidence_sequence, detectable_effect, sample_sd

WARM_UP_TOKENS = 24

WAKE_UP_TOKENS = 4
"""Tokens asked for, and prompt tokens sent times four, right before each timed leg: a process that has just been
continued is slower for a moment, and in ABBA order that would hit the second leg of every pair only. They are of a prompt
that is over: the opening of the next one names it to an engine that knows the tuning texts, and this time is not measured."""
SIDES = ("base", "candidate")

SEEN_END_TO_END = 0.5
"""Share of the saved decode time that must also be saved from submission to end. Less means that decode time was
moved to before the first token."""

DISTURBED_SHARE = 0.25
"""A pair is measured again when other programs took more than this share of the machine's CPU time during one of its
legs. The rule looks at their CPU use only, never at the result, and treats both sides alike; repeats are counted,
reported, and at most a third of the pair budget."""

STRAY_TOKENS = 32
"""Tokens per answer that an engine's counters may show beyond those it was asked for: the rest of a round, padding."""

IDLE_CPU_S = 0.05
"""CPU seconds a frozen process may seem to gain (clock resolution)."""


class PairEvent(Record):
    """Progress, after every pair."""

    pair: int
    of: int
    ratio: float
    """This pair's candidate/base ratio of decode tokens per second."""
    mean: float
    low: float
    high: float
    seconds: float


@dataclass
class _Session:
    """One comparison under way."""

    servers: dict[str, EngineServer]
    regime: Regime
    tokens: int
    watch: CpuWatch = field(default_factory=CpuWatch)
    legs: dict[str, list[Leg]] = field(default_factory=lambda: {side: [] for side in SIDES})
    decode: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    repeats_left: int = 0
    repeated: int = 0
    spent: Prompt | None = None
    """A prompt that is over."""

    def blamed(self, side: str) -> AbstractContextManager[None]:
        """Errors inside the block count against `side`."""
        return blame_candidate() if side == "candidate" else nullcontext()

    def warm_up(self, prompts: Iterator[Prompt], on_warm: Callable[[Leg], None] | None) -> None:
        """The same kind of requests as the timed ones, on other prompts; leaves both sides frozen. `on_warm` sees the candidate's."""
        for side, server in self.servers.items():
            batch = _draw(prompts, self.regime.concurrency)
            other, idle = self._resting(side)
            with self._untouched(other, idle), self.blamed(side), server.active():
                leg = figures.run_under_load(server, batch, self.regime, min(WARM_UP_TOKENS, self.tokens), side)
            if side == "candidate" and on_warm is not None:
                on_warm(leg)
            self.spent = batch[0]

    def pair(self, batch: list[Prompt], order: tuple[str, str]) -> bool:
        """Both sides answer the batch; appends to the samples. False, and nothing kept, if others disturbed it."""
        made = {side: self._leg(side, batch) for side in order}
        self.spent = batch[0]
        if self.repeats_left > 0 and max(use.foreign_share for use in self.watch.uses[-2:]) > DISTURBED_SHARE:
            self.repeats_left -= 1
            self.repeated += 1
            del self.watch.uses[-2:]
            return False
        for side in SIDES:
            self.legs[side].append(made[side])
        base, candidate = made["base"], made["candidate"]
        self.decode.append(math.log(figures.decode_rate(candidate) / figures.decode_rate(base)))
        self.end_to_end.append(math.log(figures.end_to_end_rate(candidate) / figures.end_to_end_rate(base)))
        return True

    def _leg(self, side: str, batch: list[Prompt]) -> Leg:
        server, (other, idle) = self.servers[side], self._resting(side)
        with self._untouched(other, idle), self.blamed(side), server.active():
            assert self.spent is not None, "warm_up comes first"
            wake_up(server, self.spent)
            self.watch.start(server.cpu_seconds())
            seed = len(self.decode) if self.regime.temperature > 0 else None
            leg = figures.run_under_load(server, batch, self.regime, self.tokens, side, seed)
            self.watch.stop(server.cpu_seconds())
            figures.require_full(leg, self.tokens)
        if side == "base" and (stray := stray_work(leg)):
            with self.blamed(other):
                raise LimitExceeded(f"the {server} was kept busy by somebody else: {stray}", "who knows its port?")
        return leg

    def _resting(self, side: str) -> tuple[str, EngineServer]:
        return next(item for item in self.servers.items() if item[0] != side)

    @contextmanager
    def _untouched(self, side: str, idle: EngineServer) -> Iterator[None]:
        """The stopped engine neither works inside the block, nor is it made slower by the one that runs."""
        resting, scheduled = idle.cpu_seconds(), idle.scheduling()
        yield
        with self.blamed(side):
            if idle.cpu_seconds() - resting > IDLE_CPU_S:
                raise LimitExceeded(f"the {idle} worked while it was stopped", "something continued its processes")
        with self.blamed("candidate"):
            require_unchanged(idle, scheduled)
            if side == "base":
                require_uncalled(idle)


def require_unchanged(server: EngineServer, scheduled: Scheduling) -> None:
    """Raises LimitExceeded if the cores, policy or priority of a thread of this idle engine are not those of `scheduled`."""
    now = server.scheduling()
    changed = [thread for thread in now.keys() & scheduled.keys() if now[thread] != scheduled[thread]]
    if changed:
        was, is_now = scheduled[changed[0]], now[changed[0]]
        raise LimitExceeded(
            f"somebody changed how the {server} is scheduled while it was idle: {len(changed)} threads, {was} before, {is_now} now",
            "an engine may not touch another's processes",
        )


def stray_work(leg: Leg) -> str:
    """What the engine's counters show beyond the leg's own requests, in words; empty if nothing.

    An engine that also serves a stranger's requests is timed as slow. A round in flight may add a block per answer.
    """
    answers = len(leg.generations)
    for counter, asked in (
        ("committed_tokens", figures.tokens_of(leg)),
        ("prefill_tokens", sum(len(generation.prompt_ids) for generation in leg.generations)),
    ):
        grown = leg.counters.get(counter, 0.0)
        if grown > asked + STRAY_TOKENS * answers:
            return f"'{counter}' grew by {grown:.0f} over {answers} answers of {asked} tokens"
    return ""


def wake_up(server: EngineServer, prompt: Prompt) -> None:
    """A short unmeasured request on the opening of `prompt`, then an empty cache."""
    server.client.generate(prompt.ids[: 4 * WAKE_UP_TOKENS], max_new_tokens=WAKE_UP_TOKENS, prompt_id="wake-up")
    server.client.flush_cache()


def compare(
    base: EngineServer,
    candidate: EngineServer,
    prompts: Iterator[Prompt],
    settings: MeasurementSettings,
    alpha: float,
    *,
    regime: Regime,
    on_pair: Callable[[PairEvent], None] | None = None,
    on_warm: Callable[[Leg], None] | None = None,
    settled: Callable[[Interval], bool] | None = None,
    noise_sd: float | None = None,
    max_seconds: float | None = None,
) -> tuple[Comparison, list[Leg]]:
    """Measures until the interval decides, at most `settings.max_pairs` pairs or about `max_seconds`.

    The time never cuts below `settings.min_pairs`: on a slow or busy machine two pairs would call a doubling null.

    Both servers must be started and stay usable (thawed) afterwards. `alpha` is this comparison's share of the run's
    error rate (`stats.level_for`); `noise_sd` the standard deviation of one pair's log-ratio from an A/A run, for
    `Comparison.detectable`. `on_warm` sees the candidate's answers before the first pair and may refuse it. `settled` ends the
    comparison once it holds of the interval (default: `is_decided`). Returned legs alternate by pair and hold every timed token of both sides.
    Decision: `gain` if the whole interval is above 1, the ratio is at least `settings.min_effect` and the saved time is
    seen from submission to end too; `loss` if the interval is below 1; else `null`.
    Raises CandidateFailed, EngineError (base), InfrastructureError.
    """
    began = time.monotonic()
    prompts = iter(prompts)
    session = _Session(
        {"base": base, "candidate": candidate}, regime, settings.output_tokens_timed or regime.output_tokens
    )
    with DeviceLease("cpu", f"comparing {candidate}") as lease:
        try:
            for side, server in session.servers.items():
                with session.blamed(side):
                    server.freeze()
            with session.blamed("candidate"):
                require_unchanged(base, base.scheduled)
                require_uncalled(base)
            strangers = other_engines()
            session.warm_up(prompts, on_warm)
            enough = settled or partial(is_decided, min_effect=settings.min_effect)
            decode = _measure(session, prompts, settings, alpha, on_pair, enough, began, max_seconds)
        finally:
            for server in (base, candidate):
                server.thaw()
    noise = noise_sd if noise_sd is not None else sample_sd(session.decode)
    facts: dict[str, Any] = {
        "device": lease.device,
        "lease_waited_s": round(lease.waited_s, 3),
        "pair_sd": sample_sd(session.decode),
        "noise_sd": noise,
        "noise_from": "A/A pairs" if noise_sd is not None else "this comparison",
        "other_engines": strangers,
        "pairs_repeated": session.repeated,
        **session.watch.summary(),
    }
    if strangers:
        facts["warnings"].append(f"other engines were running on this machine: {'; '.join(strangers)}")
    comparison = _conclude(session, decode, settings, alpha, noise, facts, time.monotonic() - began)
    return comparison, [
        leg for pair in zip(session.legs["base"], session.legs["candidate"], strict=True) for leg in pair
    ]


def _measure(
    session: _Session,
    prompts: Iterator[Prompt],
    settings: MeasurementSettings,
    alpha: float,
    on_pair: Callable[[PairEvent], None] | None,
    enough: Callable[[Interval], bool],
    began: float,
    max_seconds: float | None,
) -> Interval:
    """Pairs until the interval, the pair budget or the time budget says stop; never fewer than `min_pairs`."""
    order: tuple[str, str] = ("base", "candidate")
    first = time.monotonic()
    session.repeats_left = settings.max_pairs // 3
    while True:
        if max_seconds is not None and time.monotonic() - began > max_seconds / 2:
            session.repeats_left = 0
        if not session.pair(_draw(prompts, session.regime.concurrency), order):
            continue
        order = (order[1], order[0])
        done = len(session.decode)
        interval = confidence_sequence(session.decode, alpha)
        if on_pair is not None:
            on_pair(_event(session, interval, settings, time.monotonic() - began))
        if done >= settings.min_pairs and enough(interval):
            break
        if done >= settings.max_pairs:
            break
        per_pair = (time.monotonic() - first) / (done + session.repeated)
        if max_seconds is not None and done >= settings.min_pairs and time.monotonic() - began + per_pair > max_seconds:
            break
    return interval


def is_decided(interval: Interval, min_effect: float) -> bool:
    """More pairs would change nothing: surely at least `min_effect`, or surely less than it (a null or a loss)."""
    worthwhile = math.log(min_effect)
    return interval.low >= max(worthwhile, 1e-9) or interval.high < worthwhile


def _event(session: _Session, interval: Interval, settings: MeasurementSettings, seconds: float) -> PairEvent:
    return PairEvent(
        pair=len(session.decode),
        of=settings.max_pairs,
        ratio=math.exp(session.decode[-1]),
        mean=math.exp(interval.mean),
        low=interval.low_ratio,
        high=interval.high_ratio,
        seconds=seconds,
    )


def _conclude(
    session: _Session,
    decode: Interval,
    settings: MeasurementSettings,
    alpha: float,
    noise: float,
    facts: dict[str, Any],
    seconds: float,
) -> Comparison:
    whole = confidence_sequence(session.end_to_end, alpha)
    share = seen_end_to_end(session.legs["base"], session.legs["candidate"])
    facts["decode_saving_seen_end_to_end"] = share
    worthwhile = decode.mean >= math.log(settings.min_effect)
    moved = worthwhile and (share is None or share < SEEN_END_TO_END)
    if moved:
        facts["warnings"].append("decode time was moved to before the first token: no gain from submission to end")
    decision = "loss" if decode.high < 0 else "gain" if decode.low > 0 and worthwhile and not moved else "null"
    return Comparison(
        base=figures.summarise(session.servers["base"], session.legs["base"]),
        candidate=figures.summarise(session.servers["candidate"], session.legs["candidate"]),
        ratio=math.exp(decode.mean),
        low=decode.low_ratio,
        high=decode.high_ratio,
        end_to_end_ratio=math.exp(whole.mean),
        end_to_end_low=whole.low_ratio,
        end_to_end_high=whole.high_ratio,
        alpha=alpha,
        pairs=[math.exp(value) for value in session.decode],
        detectable=detectable_effect(noise, settings.max_pairs, alpha),
        decision=decision,
        seconds=seconds,
        machine=facts,
    )


def seen_end_to_end(base: list[Leg], candidate: list[Leg]) -> float | None:
    """Seconds saved from submission to end, over seconds saved in decoding; None when decoding saved nothing."""
    saved = sum(map(figures.decode_seconds, base)) - sum(map(figures.decode_seconds, candidate))
    if saved <= 0.0:
        return None
    whole = sum(map(figures.end_to_end_seconds, base)) - sum(map(figures.end_to_end_seconds, candidate))
    return whole / saved


def _draw(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    batch = list(itertools.islice(prompts, count))
    if len(batch) < count:
        raise UsageError("the comparison ran out of prompts", "give it an endless stream: PromptPool.stream")
    return batch
