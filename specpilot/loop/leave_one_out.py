"""Leave one out: after the last round, does every merged change still pay in the engine that all of them made?

Each was measured against the head before it; later ones can have taken its effect over, or made it a burden. So each in turn is
taken out of the final engine, and the rest is measured against the whole like any candidate. Nothing is taken out for
good unless the engine without it is faster by the interval's level and passes the gate. What was laid on last needs no pair:
it was measured against the very engine without it. The wall clock comes first: what it leaves no time for is named, one by one.
"""

from __future__ import annotations

from functools import partial

from specpilot.contracts import AttemptState, Candidate, Claim
from specpilot.loop.assess import assess
from specpilot.loop.attempts import advance, settle, supersede
from specpilot.loop.context import RunContext
from specpilot.loop.merge import merge_one
from specpilot.loop.records import Assessment, LeftOut, Merged, Without
from specpilot.loop.state import mechanism_of, merge_records, merged_mechanisms

EXPECTED_S = 75.0
"""Seconds of one re-test: two starts and the pairs of one comparison. Recorded runs took 31 s where it showed at once, else about 68."""
NO_TIME = "not measured: no time left"
WORKER = "leave-one-out"
PLAN = "leave_one_out"
"""Meta key: where the re-test began, what it covers, and the head it has reached, so that a resumed run goes on with it."""


def leave_one_out(context: RunContext, head: str) -> str:
    """Re-tests what is in `head`, once per head; the head afterwards (another one only if a change was taken out)."""
    plan = context.journal.get_meta(PLAN)
    if plan is None or plan["head"] != head:
        plan = {"start": head, "head": head, "attempts": [step.attempt_id for step in standing(context)]}
        context.journal.set_meta(PLAN, plan)
    if not context.deployment.measurement.leave_one_out or len(plan["attempts"]) < 2:
        return head
    context.say("phase", name="leave one out", detail="each merged change against the engine without it")
    head = plan["start"]
    steps = {step.attempt_id: step for step in merge_records(context)}
    missed: list[str] = []
    for attempt_id in plan["attempts"]:
        key = f"without/{head[:12]}/{attempt_id}"
        free = _for_free(context, steps[attempt_id], head)
        if free is None and not context.journal.finished(key) and context.budget.may_start(EXPECTED_S):
            missed.append(attempt_id)
            continue
        work = partial(_without, context, key, steps[attempt_id], head)
        told: LeftOut = context.journal.step(key, work if free is None else partial(_same, free), model=LeftOut)
        context.say("left-out", **told.model_dump(mode="json"))
        if told.commit is not None:
            head = _take_out(context, key, told)
            plan |= {"head": head}
            context.journal.set_meta(PLAN, plan)
            context.trees.set_head(head)
    if missed != plan.get("missed", []):
        context.journal.set_meta(PLAN, plan | {"missed": missed})
        for attempt_id in missed:
            context.say("left-out", **not_measured(context, attempt_id).model_dump(mode="json"))
        if missed:
            rest = ", ".join(name_of(context, item) for item in missed)
            text = f"the wall clock left no time to re-test by leaving it out: {rest}"
            context.say("note", level="warning", text=text)
    return head


def not_measured(context: RunContext, attempt_id: str) -> LeftOut:
    """What is said of a change that the wall clock left no time for. Never stored as a result: a run with more time re-tests it."""
    name = name_of(context, attempt_id)
    return LeftOut(attempt_id=attempt_id, name=name, outcome=Without.not_told, detail=NO_TIME)


def missed(context: RunContext) -> list[LeftOut]:
    """Changes in the final engine that were not re-tested for want of time."""
    plan = context.journal.get_meta(PLAN) or {}
    return [not_measured(context, attempt_id) for attempt_id in plan.get("missed", [])]


def expected_s(context: RunContext) -> float:
    """Seconds that re-testing what is in the engine by now will take, about, once another change lies on top of it."""
    if not context.deployment.measurement.leave_one_out:
        return 0.0
    names = [name_of(context, step.attempt_id) for step in standing(context)]
    return EXPECTED_S * sum(not needed_by(context, name) for name in names)


def standing(context: RunContext) -> list[Merged]:
    """The merged changes that are in the engine now, in the order in which they were laid on."""
    rows = {row.id: row for row in context.journal.attempts(state=AttemptState.merged) if row.worker != WORKER}
    return [step for step in merge_records(context) if step.attempt_id in rows and step.before != step.after]


def name_of(context: RunContext, attempt_id: str) -> str:
    """The mechanism's name, or the attempt's where it has none."""
    return mechanism_of(context.journal.attempt(attempt_id)) or attempt_id


def needed_by(context: RunContext, name: str) -> list[str]:
    """Merged mechanisms that require `name`, by the memory's word."""
    known = {item.mechanism.name: item.mechanism.requires for item in context.memory.mechanisms()}
    return [other for other in merged_mechanisms(context) if name in known.get(other, [])]


def _for_free(context: RunContext, step: Merged, head: str) -> LeftOut | None:
    """What is known of a change without a measurement: others need it, or it came last and was measured as it was laid on."""
    name = name_of(context, step.attempt_id)
    if users := needed_by(context, name):
        return _told(step, name, Without.not_told, f"{', '.join(users)} cannot do without it")
    if step.after == head and step.gain is not None:
        return LeftOut(
            attempt_id=step.attempt_id,
            name=name,
            outcome=Without.still_helps,
            detail="laid on last: as measured then, against the engine without it",
            gain=step.gain,
            low=step.low,
            high=step.high,
            head=head,
        )
    return None


def _same(known: LeftOut) -> LeftOut:
    return known


def _without(context: RunContext, key: str, step: Merged, head: str) -> LeftOut:
    name = name_of(context, step.attempt_id)
    reverted = context.trees.merge(head, step.before, step.after, f"without-{step.attempt_id}")
    if reverted.commit is None or reverted.commit == head:
        why = (reverted.conflict or "later changes hold it already").splitlines()[0]
        return _told(step, name, Without.not_told, f"its patch does not come out of the engine: {why}")
    candidate = _candidate(context, step.attempt_id, name, head, reverted.commit)
    assessment = assess(context, f"{key}/assess", candidate, head)
    comparison = assessment.comparison
    if comparison is None:
        detail = f"the engine does not work without it ({assessment.reason}): others build on it"
        return _told(step, name, Without.not_told, detail)
    outcome = {"loss": Without.still_helps, "null": Without.no_visible_effect}.get(comparison.decision, Without.hurts)
    refused = outcome is Without.hurts and not assessment.accepted
    return LeftOut(
        attempt_id=step.attempt_id,
        name=name,
        outcome=outcome,
        detail=f"kept: the engine without it was refused: {assessment.detail}" if refused else "",
        gain=1.0 / comparison.ratio,
        low=1.0 / comparison.high,
        high=1.0 / comparison.low if comparison.low > 0 else None,
        head=head,
        commit=candidate.commit if assessment.accepted else None,
    )


def _told(step: Merged, name: str, outcome: Without, detail: str) -> LeftOut:
    return LeftOut(attempt_id=step.attempt_id, name=name, outcome=outcome, detail=detail)


def _candidate(context: RunContext, attempt_id: str, name: str, head: str, commit: str) -> Candidate:
    component = context.journal.attempt(attempt_id).component
    hypothesis = f"The engine is faster without {name}: what came later made it a burden."
    return Candidate(
        attempt_id=f"without-{attempt_id}",
        worker=WORKER,
        base_commit=head,
        commit=commit,
        branch=f"specpilot/without-{attempt_id}",
        claim=Claim(component=component, hypothesis=hypothesis),
    )


def _take_out(context: RunContext, key: str, told: LeftOut) -> str:
    """Makes the engine without the change the head: an attempt of its own, measured and judged already."""
    assert told.commit is not None and told.head is not None
    candidate = _candidate(context, told.attempt_id, told.name, told.head, told.commit)
    assessment: Assessment = context.journal.result(f"{key}/assess", Assessment)
    data = {"task": f"Take {told.name} out again", "candidate": candidate.model_dump(mode="json")}
    component = candidate.claim.component
    context.journal.create_attempt(candidate.attempt_id, round=0, worker=WORKER, component=component, data=data)
    advance(context, candidate.attempt_id, AttemptState.submitted)
    settle(context, candidate, assessment)
    step = merge_one(context, f"{key}/merge", candidate, assessment, told.head)
    supersede(context, told.attempt_id, "taken out again: the final engine is faster without it")
    return step.after
