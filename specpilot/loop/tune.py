"""Tune: the search worker's trials, screened as quick paired legs against the round's base.

Screening decides nothing: the best setting becomes a candidate like any other, measured and gated in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from specpilot.agents import SearchWorker, WorkContext
from specpilot.agents.search import Trial
from specpilot.evaluation.errors import CandidateFailed, blame_candidate
from specpilot.evaluation.lease import DeviceLease
from specpilot.evaluation.legs import decode_rate, require_full, run_under_load
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.evidence import seal_file
from specpilot.loop.assess import patiently
from specpilot.loop.budget import EXPECTED_ASSESS_S, BudgetClock
from specpilot.loop.context import RunContext
from specpilot.loop.explore import submit
from specpilot.loop.leave_one_out import expected_s
from specpilot.loop.records import Submitted, WorkerResult

SCREENING_PROMPTS = 2
EXPECTED_TRIAL_S = 25.0
"""Seconds of one trial: a start and three short legs. Recorded ones took 19 to 30."""


def tune(context: RunContext, number: int, work: WorkContext, waiting: int = 0) -> list[Submitted]:
    """Runs the search for this base, once; at most one candidate comes out.

    `waiting`: candidates of this round that are still to be measured. Trials end while there is time for these and for
    the search's own, and to re-test what was merged before: what memory knows to help must not go unmeasured because knobs
    were screened before it, and neither must what the run claims for each of its changes.
    """
    result: WorkerResult = context.journal.step(
        f"r{number}/worker/search", lambda: _search(context, number, work, waiting), model=WorkerResult
    )
    if result.note:
        context.say("note", level="info", text=f"search: {result.note}")
    return result.attempts


def may_try(budget: BudgetClock, waiting: int, owed_s: float = 0.0) -> bool:
    """Whether a further trial leaves time for `waiting` candidates, for what the search itself may propose, and for `owed_s` more."""
    return budget.may_start(EXPECTED_TRIAL_S + EXPECTED_ASSESS_S * (waiting + 1) + owed_s) is None


def _search(context: RunContext, number: int, work: WorkContext, waiting: int) -> WorkerResult:
    settings = context.deployment.agents.search
    worker = SearchWorker(trials=settings.trials, control=settings.control)
    session = worker.open(work)
    if session is None:
        return WorkerResult(worker="search", attempts=[], note="the engine declares nothing to tune")
    key = f"r{number}-search"
    owed_s = expected_s(context)
    with context.engine(work.base_commit, "final", f"{key}-base") as base:
        base.freeze()
        while may_try(context.budget, waiting, owed_s) and (trial := session.ask()) is not None:
            ratio = patiently(context, key, partial(_screen, context, key, base, work, trial))
            session.tell(trial, ratio)
            context.say("trial", worker="search", arm=trial.arm, values=trial.values, ratio=ratio)
    seal_file(context.journal, context.run_dir, session.path)
    proposal = session.proposal()
    attempts = [] if proposal is None else [submit(context, number, f"{key}-1", proposal, work.base_commit)]
    return WorkerResult(worker="search", attempts=attempts, note=session.report().text)


def _screen(context: RunContext, key: str, base: EngineServer, work: WorkContext, trial: Trial) -> float | None:
    """Decode rate of a setting over the base's on the same few prompts, alternating; None if its engine fails."""
    name = f"{key}-trial"
    worktree = context.trees.checkout(name, work.base_commit)
    trial.apply(worktree)
    commit = context.trees.commit_all(name, f"Trial {trial.number}: {trial.values}")
    regime = context.deployment.regime
    tokens = min(64, context.deployment.timed_tokens())
    prompts = context.prompts(f"{key}-{trial.number}").take("tuning", (SCREENING_PROMPTS + 1) * regime.concurrency)
    batches = [prompts[i : i + regime.concurrency] for i in range(0, len(prompts), regime.concurrency)]

    def rate(server: EngineServer, batch: Sequence[Prompt]) -> float:
        server.thaw()
        try:
            server.client.flush_cache()
            leg = run_under_load(server, batch, regime, tokens, "base" if server is base else "candidate")
            require_full(leg, tokens)
            return decode_rate(leg)
        finally:
            server.freeze()

    try:
        return screened(context.engine(commit, "final", f"{key}-{trial.number}"), base, batches, rate)
    except CandidateFailed as error:
        context.say("note", level="info", text=f"search: {trial.values} failed: {error.detail.splitlines()[0]}")
        return None


def screened(
    starting: AbstractContextManager[EngineServer],
    base: EngineServer,
    batches: Sequence[Sequence[Prompt]],
    rate: Callable[[EngineServer, Sequence[Prompt]], float],
) -> float:
    """Geometric mean, over all batches but the first, of a trial's rate over the base's. The first only warms the trial's engine.

    Raises CandidateFailed when the trial's engine fails. An `EngineError` of the base passes as it is, whether its process lives
    or not: it says nothing about the trial.
    """
    with ExitStack() as stack:
        with blame_candidate():
            tried = stack.enter_context(starting)
        stack.enter_context(DeviceLease("cpu", f"screening {tried.commit[:12]}"))
        with blame_candidate():
            rate(tried, batches[0])
        logs = []
        for batch in batches[1:]:
            with blame_candidate():
                found = rate(tried, batch)
            logs.append(math.log(found / rate(base, batch)))
    return math.exp(sum(logs) / len(logs))
