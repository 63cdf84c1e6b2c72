"""Finish: the closing session (four engines, one session, prompts that no worker saw), the gap table of the winner, the report."""

from __future__ import annotations

from typing import Any

from specpilot.contracts import GapTable, StopReason
from specpilot.loop.context import RunContext
from specpilot.loop.observe import observe
from specpilot.loop.prepare import measure_four

CLOSING_PROMPTS = 8


def finish(context: RunContext, head: str, stop: StopReason) -> dict[str, Any]:
    """Measures `ar`, `stock`, `final` and `final-ar` together, once per head, and writes the report."""
    first = context.trees.first_commit
    short = head[:12]
    context.say("phase", name="closing", detail="ar, stock, final and final-ar in one session")
    variants = [
        ("ar", first, "ar"),
        ("stock", first, "stock"),
        ("final", head, "final"),
        ("final-ar", head, "final-ar"),
    ]
    four: dict[str, Any] = context.journal.step(
        f"final/{short}",
        lambda: measure_four(context, f"final-{short}", variants, prompts=CLOSING_PROMPTS, which="hidden"),
    )
    observe(context, f"final/{short}/gaps", head, roofs_now=True)
    context.journal.set_meta("final_head", head)
    context.journal.set_meta("stop_reason", stop.value)
    context.budget.save()
    return four


def final_gaps(context: RunContext, head: str) -> GapTable | None:
    """The winner's gap table, if it was measured."""
    key = f"final/{head[:12]}/gaps"
    return context.journal.result(key, GapTable) if context.journal.finished(key) else None
