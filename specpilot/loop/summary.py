"""From the journal to the report's data: nothing is measured, started or decided here."""

from __future__ import annotations

import shlex
import time
from typing import Any

from specpilot.contracts import AttemptState, Calibration, GapTable
from specpilot.gate.records import SelfTestResult
from specpilot.journal import AttemptRow
from specpilot.loop.context import RunContext
from specpilot.loop.leave_one_out import WORKER, missed
from specpilot.loop.records import LeftOut
from specpilot.loop.state import mechanism_of, merge_records
from specpilot.report.data import (
    Again,
    Command,
    Fate,
    Figure,
    MemoryUse,
    Moment,
    Ratio,
    ReportData,
    SelfTest,
    Step,
)
from specpilot.report.state import lines_of
from specpilot.words import count

SHOWN_EVENTS = ("phase", "merge", "left-out", "note", "trial")


def report_data(context: RunContext) -> ReportData:
    """Everything that the summary and the HTML show, for a finished run or one that ended early."""
    journal = context.journal
    meta = journal.meta()
    machine = _result(context, "machine") or {}
    four = _closing(context) or {}
    rows = journal.attempts()
    fates = [_fate(row) for row in rows]
    steps = merged_steps(context)
    tables = gap_tables(context)
    return ReportData(
        deployment=context.deployment.name,
        run_id=context.meta.run_id,
        version=context.meta.version,
        created=context.meta.created,
        finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        summary=_summary(context),
        stop_reason=str(meta.get("stop_reason") or ""),
        elapsed_s=context.budget.elapsed_s(),
        limit_s=context.budget.limit_s,
        rounds=sum(1 for row in journal.steps() if row.key.endswith("/result") and row.finished),
        hardware=machine.get("hardware", {}),
        software=machine.get("software", {}),
        closed=bool(meta.get("final_head")),
        figures=[Figure.model_validate(value) for value in four.get("variants", {}).values()],
        ratios=[Ratio.model_validate(value) for value in four.get("ratios", [])],
        steps=steps,
        left_out=left_out(context),
        attempts=fates,
        gaps_before=tables[0] if tables else None,
        gaps_after=_final_gaps(context),
        calibration=_record(context, "calibrate", Calibration),
        self_test=_self_test(context),
        memory=memory_use(rows, steps),
        trials=len(journal.events(kind="trial")),
        events=_moments(context),
        commands=_commands(context),
        notes=_notes(context),
        run_dir=str(context.run_dir),
    )


def merged_steps(context: RunContext) -> list[Step]:
    """Accepted changes in the order in which they were laid on the engine, with the gain of each."""
    found = []
    for merged in merge_records(context):
        if merged.gain is not None:
            attempt = context.journal.attempt(merged.attempt_id)
            found.append(
                Step(
                    attempt_id=merged.attempt_id,
                    mechanism=mechanism_of(attempt) or (attempt.id if attempt.worker == WORKER else None),
                    component=attempt.component,
                    gain=merged.gain,
                    low=merged.low,
                    high=merged.high,
                )
            )
    return found


def left_out(context: RunContext) -> list[Again]:
    """What leaving each merged change out of the final engine showed, or that there was no time for it."""
    keys = context.journal.finished_keys(lambda key: key.startswith("without/") and key.count("/") == 2)
    found: list[LeftOut] = [*(context.journal.result(key, LeftOut) for key in keys), *missed(context)]
    return [Again.model_validate(item.model_dump(mode="json", include=set(Again.model_fields))) for item in found]


def gap_tables(context: RunContext) -> list[GapTable]:
    """Gap tables of the rounds, oldest first."""
    keys = context.journal.finished_keys(lambda key: key.endswith("/observe"))
    return [context.journal.result(key, GapTable) for key in keys]


def memory_use(rows: list[AttemptRow], steps: list[Step]) -> MemoryUse:
    """How much recall helped this run, by the attempts alone. As in the memory, a mechanism counts once, whatever rounds tried it."""
    recalled = [row for row in rows if row.worker == "recall"]

    def names(rows: list[AttemptRow]) -> int:
        return len({mechanism_of(row) or row.id for row in rows})

    assessed = [row for row in recalled if row.data.get("assessment")]
    merged = {row.id for row in recalled if row.state is AttemptState.merged}
    gain = 1.0
    for step in steps:
        gain *= step.gain if step.attempt_id in merged else 1.0
    return MemoryUse(
        recalled=names(recalled),
        tried=names(assessed),
        accepted=names([row for row in assessed if row.data["assessment"].get("accepted")]),
        merged=names([row for row in recalled if row.id in merged]),
        gain=gain if merged else None,
        mechanisms=[step.name for step in steps if step.attempt_id in merged],
        learned=sum(1 for r in rows if r.worker != WORKER and (r.data.get("assessment") or {}).get("comparison")),
    )


def _fate(row: AttemptRow) -> Fate:
    candidate = row.data.get("candidate") or {}
    claim = candidate.get("claim") or {}
    assessment = row.data.get("assessment") or {}
    return Fate(
        id=row.id,
        round=row.round,
        worker=row.worker,
        component=row.component,
        state=row.state.value,
        reason=row.reason.value if row.reason else None,
        detail=row.detail,
        mechanism=mechanism_of(row),
        hypothesis=claim.get("hypothesis") or str(row.data.get("task") or ""),
        predicted_gain=claim.get("predicted_gain"),
        commit=candidate.get("commit", ""),
        comparison=assessment.get("comparison"),
        verdict=assessment.get("verdict"),
    )


def _closing(context: RunContext) -> dict[str, Any] | None:
    head = context.journal.meta().get("final_head")
    return _result(context, f"final/{head[:12]}") if head else _result(context, "baselines")


def _final_gaps(context: RunContext) -> GapTable | None:
    head = context.journal.meta().get("final_head")
    return _record(context, f"final/{head[:12]}/gaps", GapTable) if head else None


def _self_test(context: RunContext) -> SelfTest | None:
    result = _record(context, "selftest", SelfTestResult)
    return None if result is None else SelfTest.model_validate(result.model_dump(mode="json"))


def _result(context: RunContext, key: str) -> Any:
    return context.journal.result(key) if context.journal.finished(key) else None


def _record(context: RunContext, key: str, model: Any) -> Any:
    return context.journal.result(key, model) if context.journal.finished(key) else None


def _summary(context: RunContext) -> str:
    deployment = context.deployment
    regime = deployment.regime
    sampling = "greedy" if regime.temperature == 0 else f"temperature {regime.temperature:g}"
    return (
        f"Target {context.identity.architecture} ({context.identity.target_sha256[:12]}), "
        f"drafter {deployment.drafter.method.value}, {count(regime.concurrency, 'request')} at a time, "
        f"{count(deployment.timed_tokens(), 'timed token')} per answer, {sampling}."
    )


def _notes(context: RunContext) -> list[str]:
    notes = [str(e.data["text"]) for e in context.journal.events(kind="note") if e.data.get("level") == "warning"]
    for table in gap_tables(context)[:1]:
        notes += table.warnings
    return list(dict.fromkeys(notes))


def _commands(context: RunContext) -> list[Command]:
    run, source = shlex.quote(context.meta.run_id), shlex.quote(str(context.meta.deployment_path))
    return [
        Command(what="Run it again", command=f"specpilot optimize --deployment {source}"),
        Command(what="Take the engine", command=f"specpilot export {run} --to engine"),
        Command(what="Review the changes", command=f"specpilot export {run} --to patches --format patches"),
        Command(what="See what was learned", command="specpilot memory inspect"),
    ]


def _moments(context: RunContext) -> list[Moment]:
    """The journal's events worth a line in the report, in the live view's words."""
    told = lines_of((event.at, event.kind, event.data) for event in context.journal.events())
    return [Moment(at=at, kind=kind, text=text) for at, kind, text in told if kind in SHOWN_EVENTS]
