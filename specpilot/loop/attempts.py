"""Attempts in the journal: forward only, so that a resumed run may tell the same story twice."""

from __future__ import annotations

from typing import Any

from specpilot.contracts import AttemptState, Candidate, Reason
from specpilot.loop.context import RunContext
from specpilot.loop.records import Assessment
from specpilot.loop.state import mechanism_of

NOT_MEASURED = "not measured: the wall clock ran out"
NOT_MERGED = "accepted, but not merged"
"""Why an attempt was superseded without having been settled: a run that is given more time may propose it again."""
_ENDED = {AttemptState.rejected, AttemptState.superseded, AttemptState.merged}
_PATH = [
    AttemptState.planned,
    AttemptState.working,
    AttemptState.submitted,
    AttemptState.measured,
    AttemptState.gated,
    AttemptState.accepted,
    AttemptState.merged,
]


def advance(
    context: RunContext, attempt_id: str, state: AttemptState, *, detail: str = "", data: dict[str, Any] | None = None
) -> None:
    """Walks an attempt forward to `state` through every state between; does nothing if it is there or beyond."""
    now = context.journal.attempt(attempt_id).state
    if now in _ENDED and now is not state:
        return
    for step in _PATH[_PATH.index(now) + 1 : _PATH.index(state) + 1]:
        last = step is state
        context.journal.move_attempt(attempt_id, step, detail=detail if last else "", data=data if last else None)
    _show(context, attempt_id)


def reject(context: RunContext, attempt_id: str, reason: Reason, detail: str) -> None:
    """Rejects an attempt once; the first reason stays."""
    if context.journal.attempt(attempt_id).state not in _ENDED:
        context.journal.move_attempt(attempt_id, AttemptState.rejected, reason=reason, detail=detail)
    _show(context, attempt_id)


def supersede(context: RunContext, attempt_id: str, detail: str) -> None:
    """Marks an accepted attempt as not part of the merged engine."""
    if context.journal.attempt(attempt_id).state is not AttemptState.superseded:
        context.journal.move_attempt(attempt_id, AttemptState.superseded, detail=detail)
    _show(context, attempt_id)


def settle(context: RunContext, candidate: Candidate, assessment: Assessment) -> None:
    """Writes what an assessment means for its attempt."""
    data = {"assessment": assessment.model_dump(mode="json")}
    if assessment.comparison is not None:
        advance(context, candidate.attempt_id, AttemptState.measured, data=data)
    if assessment.accepted:
        advance(context, candidate.attempt_id, AttemptState.accepted, detail=assessment.detail, data=data)
    else:
        if context.journal.attempt(candidate.attempt_id).state not in _ENDED:
            state = context.journal.attempt(candidate.attempt_id).state
            context.journal.move_attempt(candidate.attempt_id, state, data=data)
        reject(context, candidate.attempt_id, assessment.reason or Reason.crashed, assessment.detail)


def _show(context: RunContext, attempt_id: str) -> None:
    row = context.journal.attempt(attempt_id)
    context.say(
        "attempt",
        id=row.id,
        round=row.round,
        worker=row.worker,
        component=row.component,
        state=row.state.value,
        reason=row.reason.value if row.reason else None,
        detail=row.detail,
        mechanism=mechanism_of(row),
        task=row.data.get("task"),
    )
