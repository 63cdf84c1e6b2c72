"""Finish: the closing session (four engines, one session, prompts that no worker saw), the gap table of the winner, the report."""

from __future__ import annotations

from typing import Any

from specpilot.contracts import Calibration, Leg, StopReason
from specpilot.evaluation.baselines import Baselines
from specpilot.gate.closing import closing_checks, faults_of
from specpilot.gate.hidden import vocab_size
from specpilot.gate.policy import policy_of
from specpilot.gate.records import SelfTestResult
from specpilot.gate.selftest import resolution_note
from specpilot.loop.context import RunContext
from specpilot.loop.observe import observe, time_floor
from specpilot.loop.prepare import measure_four, whole_batches
from specpilot.loop.state import mechanism_of, merge_records

CLOSING_PROMPTS = 8


def finish(context: RunContext, head: str, stop: StopReason) -> dict[str, Any]:
    """Measures `ar`, `stock`, `final` and `final-ar` together, once per head, and writes the report.

    Figures of an engine whose answers there fail the gate are withheld, with a warning.
    """
    first = context.trees.first_commit
    short = head[:12]
    context.say("phase", name="closing", detail="ar, stock, final and final-ar in one session")
    if not context.journal.finished(f"final/{short}"):
        _name_small_gains(context)
    variants = [
        ("ar", first, "ar"),
        ("stock", first, "stock"),
        ("final", head, "final"),
        ("final-ar", head, "final-ar"),
    ]
    four: dict[str, Any] = context.journal.step(
        f"final/{short}",
        lambda: measure_four(
            context,
            f"final-{short}",
            variants,
            prompts=whole_batches(context, CLOSING_PROMPTS),
            which="closing",
            judged=None
            if head == first
            else lambda *measured: _judged(context, short, *measured),  # stock is what it is
        ),
    )
    if not context.journal.finished(f"final/{short}/gaps"):
        context.doing("profiling final, the machine's roofs measured just before and after")
    observe(context, f"final/{short}/gaps", head, roofs_now=True)
    context.journal.set_meta("final_head", head)
    context.journal.set_meta("stop_reason", stop.value)
    context.budget.save()
    return four


def _name_small_gains(context: RunContext) -> None:
    """Says which merged gains are smaller than what the session's A/A pairs told apart, where these told little."""
    if not context.journal.finished("selftest"):
        return
    result = context.journal.result("selftest", SelfTestResult)
    told = result.told_apart
    if not resolution_note(result) or told is None:
        return
    small = [
        f"{mechanism_of(context.journal.attempt(step.attempt_id)) or step.attempt_id} {step.gain:.2f}x"
        for step in merge_records(context)
        if step.gain is not None and step.gain < told
    ]
    if small:
        text = (
            f"merged gains below {told:.2f}x, the smallest difference that the A/A pairs told apart: {', '.join(small)}"
        )
        context.say("note", level="warning", text=text)


def _judged(context: RunContext, short: str, found: Baselines, legs: dict[str, list[Leg]], block: int) -> Baselines:
    """Without the figures of engines that answered otherwise than the target would. The reference starts only now: they are gone."""
    context.doing("the closing answers are forced through the reference")
    with context.engine(context.trees.first_commit, "reference", f"final-{short}-reference") as reference:
        judged = closing_checks(
            legs,
            reference.client,
            context.journal.result("calibrate", Calibration),
            policy_of(context.deployment.gate),
            block_size=max(context.identity.block_size or 1, block),
            floor=time_floor(context),
            vocab=vocab_size(context.resolved.target_dir),
            temperature=context.deployment.regime.temperature,
        )
    faults = faults_of(judged)
    for name, fault in faults.items():
        context.say("note", level="warning", text=f"the closing figures of {name} are withheld: {fault}")
    told = {name: checks[-1].detail for name, checks in judged.items() if name not in faults}
    for name, detail in told.items():
        context.say("note", level="info", text=f"closing answers of {name} against the reference: {detail}")
    return found.without(faults).model_copy(update={"judged": told})
