"""How the report counts recall: by mechanism, once per run, as the memory does."""

from __future__ import annotations

from typing import Any

from specpilot.contracts import AttemptState, Reason
from specpilot.journal import AttemptRow
from specpilot.loop.summary import memory_use
from specpilot.report.data import Step


def row(name: str, mechanism: str, state: AttemptState, assessed: bool = True, worker: str = "recall") -> AttemptRow:
    data: dict[str, Any] = {"mechanism": mechanism}
    if assessed:
        data["assessment"] = {"accepted": state is AttemptState.merged, "comparison": {"ratio": 1.0}}
    reason = Reason.no_gain if state is AttemptState.rejected else None
    return AttemptRow(name, 1, worker, "host", state, reason, "", data, 0.0, 0.0)


def test_a_mechanism_that_three_rounds_tried_counts_once() -> None:
    rows = [
        row("r1-recall-1", "a", AttemptState.rejected),
        row("r2-recall-1", "a", AttemptState.rejected),
        row("r3-recall-1", "a", AttemptState.merged),
        row("r2-recall-2", "b", AttemptState.superseded, assessed=False),
        row("r1-recall-2", "c", AttemptState.rejected),
        row("x-1", "d", AttemptState.merged, worker="external"),
    ]
    use = memory_use(rows, [Step(attempt_id="r3-recall-1", mechanism="a", gain=1.5), Step(attempt_id="x-1", gain=2.0)])
    assert (use.recalled, use.tried, use.accepted, use.merged) == (3, 2, 1, 1)
    assert use.gain == 1.5 and use.mechanisms == ["a"]
