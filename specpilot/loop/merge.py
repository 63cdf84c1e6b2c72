"""Merge: accepted candidates one by one onto the head, the sum measured and judged again each time.

The largest measured gain goes first: it is already proven against the round's base, so it becomes the head as
it stands. Every further one is laid on by a three-way merge, and must gain over the head it was laid on.
"""

from __future__ import annotations

from specpilot.contracts import AttemptState, Candidate, Comparison, Reason
from specpilot.loop.assess import assess
from specpilot.loop.attempts import advance, supersede
from specpilot.loop.context import RunContext
from specpilot.loop.records import Assessment, Merged

EXPECTED_MERGE_S = 60.0


def merge_winners(
    context: RunContext, number: int, accepted: list[tuple[Candidate, Assessment]]
) -> tuple[str, list[Merged]]:
    """Lays the accepted candidates of one round onto the best engine; returns the new head and every step.

    That is the round's base, unless an outsider's attempt was merged at rest while the round was cut off.
    """
    onto: str = context.journal.step(f"r{number}/onto", context.trees.best)
    head = onto
    steps: list[Merged] = []
    for candidate, assessment in _by_gain(accepted):
        key = f"r{number}/merge/{candidate.attempt_id}"
        free = candidate.base_commit == head
        if not free and not context.journal.finished(key) and context.budget.may_start(EXPECTED_MERGE_S):
            name = " ".join(filter(None, (candidate.attempt_id, candidate.claim.mechanism)))
            context.say("note", text=f"{name}: accepted, but no time is left to merge it", level="warning")
            break
        step = merge_one(context, key, candidate, assessment, head)
        steps.append(step)
        head = step.after
    if head != onto:
        context.trees.set_head(head)
    return head, steps


def merge_one(context: RunContext, key: str, candidate: Candidate, assessment: Assessment, head: str) -> Merged:
    """Lays one accepted candidate onto `head`, once; as it stands where `head` is what it was measured against."""

    def run() -> Merged:
        if candidate.base_commit == head:
            detail = "fast-forward: measured and judged as it stands"
            return _step(candidate, head, candidate.commit, assessment.comparison, detail)
        return _next(context, key, candidate, head)

    step: Merged = context.journal.step(key, run, model=Merged)
    _record(context, step, candidate)
    return step


def _by_gain(accepted: list[tuple[Candidate, Assessment]]) -> list[tuple[Candidate, Assessment]]:
    def gain(pair: tuple[Candidate, Assessment]) -> float:
        comparison = pair[1].comparison
        return comparison.ratio if comparison else 0.0

    return sorted(accepted, key=gain, reverse=True)


def _next(context: RunContext, key: str, candidate: Candidate, head: str) -> Merged:
    outcome = context.trees.merge(head, candidate.commit, candidate.base_commit, key.replace("/", "-"))
    if outcome.commit is None:
        return _step(candidate, head, head, None, outcome.conflict, Reason.does_not_apply)
    context.doing("laid on the head, measured in pairs with it", candidate.attempt_id)
    summed = candidate.model_copy(update={"commit": outcome.commit, "base_commit": head})
    assessment = assess(context, f"{key}/assess", summed, head)
    if assessment.accepted:
        detail = "measured and judged on top of the head"
        return _step(candidate, head, outcome.commit, assessment.comparison, detail)
    reason = Reason.superseded_by_sum if assessment.reason in (Reason.no_gain, None) else assessment.reason
    return _step(candidate, head, head, assessment.comparison, assessment.detail, reason)


def _step(
    candidate: Candidate,
    before: str,
    after: str,
    comparison: Comparison | None,
    detail: str,
    reason: Reason | None = None,
) -> Merged:
    """One step of the merge; with a reason it is one that was left out."""
    return Merged(
        attempt_id=candidate.attempt_id,
        before=before,
        after=after,
        merged=reason is None,
        reason=reason,
        detail=detail,
        gain=comparison.ratio if comparison else None,
        low=comparison.low if comparison else None,
        high=comparison.high if comparison else None,
    )


def _record(context: RunContext, step: Merged, candidate: Candidate) -> None:
    if step.merged:
        advance(context, step.attempt_id, AttemptState.merged, detail=step.detail)
    else:
        supersede(context, step.attempt_id, f"{step.reason}: {step.detail}")
    context.say("merge", **step.model_dump(mode="json"), mechanism=candidate.claim.mechanism)
