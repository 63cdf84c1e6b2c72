"""One round of the loop: observe, direct, explore, assess, merge, learn."""

from __future__ import annotations

from specpilot.agents import RecallWorker, WorkContext, Worker
from specpilot.contracts import AttemptState, Candidate, StopReason
from specpilot.loop.assess import assess
from specpilot.loop.attempts import NOT_MEASURED, NOT_MERGED, settle, supersede
from specpilot.loop.budget import EXPECTED_ASSESS_S
from specpilot.loop.context import RunContext
from specpilot.loop.explore import explore, work_context
from specpilot.loop.learn import learn, learn_realised
from specpilot.loop.merge import merge_winners
from specpilot.loop.observe import observe
from specpilot.loop.records import Assessment, RoundResult, Submitted
from specpilot.loop.tune import tune

BELIEVED = 0.9
"""A round this much shorter than its bound shows that the bound is wrong, or the trace; it is no reason to stop."""
HEADROOM = 1.03
"""Below this ratio of round time to bound there is nothing left that a round could pay for."""


def run_round(context: RunContext, number: int, present: list[str]) -> RoundResult:
    """Runs round `number` on the best engine at its beginning, outsiders' merges included; a finished round is read from the journal."""
    key = f"r{number}/result"
    if context.journal.finished(key):
        result: RoundResult = context.journal.result(key, RoundResult)
        return result
    base: str = context.journal.step(f"r{number}/base", context.trees.best)
    context.say("phase", name=f"round {number}", detail="observe")
    table = observe(context, f"r{number}/observe", base, "stock" if base == context.trees.first_commit else "final")
    learn_realised(context)
    if table.bound_ms * BELIEVED < table.round_ms < table.bound_ms * HEADROOM:
        return RoundResult(round=number, head=base, attempts=[], merged=[], stop=StopReason.no_headroom)
    work = work_context(context, number, base, table, present, context.deployment.agents.recall.max_candidates)
    submitted = _submitted(context, number, work)
    assessed, stop = _assess_all(context, number, submitted)
    head, merged = merge_winners(context, number, [(c, a) for c, a in assessed if a.accepted])
    kept = {step.attempt_id for step in merged if step.merged}
    for candidate, assessment in assessed:
        if assessment.accepted and candidate.attempt_id not in kept:
            supersede(context, candidate.attempt_id, NOT_MERGED)
    learn(context, number, work, assessed)
    return context.journal.step(
        key,
        lambda: RoundResult(
            round=number,
            head=head,
            attempts=[item.attempt_id for item in submitted],
            merged=[step.attempt_id for step in merged if step.merged],
            stop=stop,
        ),
        model=RoundResult,
    )


def _submitted(context: RunContext, number: int, work: WorkContext) -> list[Submitted]:
    """Recall's and outsiders' candidates, then what search found; each already a commit."""
    context.say("phase", name=f"round {number}", detail="workers")
    agents = context.deployment.agents
    workers: list[Worker] = [RecallWorker(context.memory)] if agents.recall.enabled else []
    found = explore(context, number, workers, work)
    found += context.journal.step(f"r{number}/outsiders", lambda: waiting_outsiders(context), model=Submitted)
    if agents.search.enabled and number == context.deployment.budget.rounds:
        found += tune(context, number, work, waiting=sum(item.candidate is not None for item in found))
    return found


def waiting_outsiders(context: RunContext) -> list[Submitted]:
    """Attempts that `specpilot attempt submit` left for a run that was busy, whatever commit they build on."""
    found = []
    for row in context.journal.attempts(state=AttemptState.submitted):
        if row.worker == "external" and row.data.get("candidate"):
            candidate = Candidate.model_validate(row.data["candidate"])
            found.append(
                Submitted(
                    attempt_id=row.id, worker=row.worker, component=row.component, why="submitted", candidate=candidate
                )
            )
    return found


def _judged_elsewhere(context: RunContext, item: Submitted) -> bool:
    """An outsider's attempt that was submitted again while this run was at rest, and judged then."""
    return item.worker == "external" and context.journal.attempt(item.attempt_id).state is not AttemptState.submitted


def _assess_all(
    context: RunContext, number: int, submitted: list[Submitted]
) -> tuple[list[tuple[Candidate, Assessment]], StopReason | None]:
    """Measures and judges one after another; the wall clock ends it between two candidates, never inside one."""
    done: list[tuple[Candidate, Assessment]] = []
    stop: StopReason | None = None
    for item in submitted:
        if item.candidate is None:
            continue
        key = f"r{number}/attempt/{item.attempt_id}"
        if not context.journal.finished(key):
            if _judged_elsewhere(context, item):
                continue
            stop = stop or context.budget.may_start(EXPECTED_ASSESS_S)
            if stop is not None:
                if item.worker != "external":  # an outsider's goes on waiting: nobody would propose it again
                    supersede(context, item.attempt_id, NOT_MEASURED)
                continue
        where = "" if item.component == "*" else f", for {item.component}"
        detail = f"measured in pairs with the round's base{where}"
        context.say("phase", name=f"round {number}", detail=detail, attempt=item.attempt_id)
        assessment = assess(context, key, item.candidate, item.candidate.base_commit)
        settle(context, item.candidate, assessment)
        done.append((item.candidate, assessment))
    return done, stop
