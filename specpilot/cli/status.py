"""`specpilot status` and `specpilot runs`: what is going on, and what there is. Reads only."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from specpilot.cli.options import RunName
from specpilot.cli.tables import console
from specpilot.contracts import AttemptState, StopReason
from specpilot.errors import SpecPilotError
from specpilot.journal import AttemptRow, Journal
from specpilot.paths import JOURNAL_NAME, all_runs, find_run, runs_dir
from specpilot.report.state import lines_of
from specpilot.run_lock import RunLock

LAST_LINES = 5
"""Lines of the journal that `status` ends with."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("runs")(runs)


def status(run: RunName = "latest") -> None:
    """What a run is doing, or how it ended."""
    folder = find_run(run)
    journal = Journal.open(folder / JOURNAL_NAME)
    out = console()
    out.print(f"run       {escape(folder.name)}\nfolder    {escape(str(folder))}")
    out.print(f"deployment {escape(deployment_name(journal))}")
    out.print(f"state     {escape(state_of(folder, journal))}")
    steps = journal.steps()
    begun = [step.key for step in steps if not step.finished]
    out.print(
        f"steps     {sum(step.finished for step in steps)} finished"
        + escape(f"; begun: {', '.join(begun)}" if begun else "")
    )
    attempts = journal.attempts()
    if attempts:
        out.print(attempt_table(attempts))
    out.print(f"seal      {journal.seal_head} (of everything in the journal as it stands)", soft_wrap=True)
    told = list(lines_of((event.at, event.kind, event.data) for event in journal.events()))
    for at, _, line in told[-LAST_LINES:]:
        out.print(f"{time.strftime('%H:%M:%S', time.localtime(at))} {escape(line)}", soft_wrap=True)
    journal.close()


def runs() -> None:
    """All runs, oldest first."""
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "deployment", "started", "state", "attempts"):
        table.add_column(column, overflow="fold")
    folders = all_runs()
    for folder in folders:
        try:
            journal = Journal.open(folder / JOURNAL_NAME)
        except SpecPilotError as error:
            table.add_row(escape(folder.name), "?", "?", escape(error.message), "")
            continue
        counts = Counter(attempt.state for attempt in journal.attempts())
        merged = f"{sum(counts.values())}, {counts[AttemptState.merged]} merged"
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(journal.get_meta("created_at", 0.0)))
        table.add_row(
            escape(folder.name), escape(deployment_name(journal)), began, escape(state_of(folder, journal)), merged
        )
        journal.close()
    out.print(table if folders else f"no runs under {runs_dir()}")


def state_of(folder: Path, journal: Journal) -> str:
    """One line: who works on it, how it ended, or that it was interrupted."""
    holder = RunLock.holder(folder)
    if holder:
        return f"running ({holder})"
    reason = journal.get_meta("stop_reason")
    if reason is None:
        return f"interrupted; specpilot resume {folder.name} goes on"
    complete = any(reason == end.value for end in StopReason if end.complete)
    return f"ended: {reason}" + ("" if complete else f"; specpilot resume {folder.name} goes on")


def deployment_name(journal: Journal) -> str:
    """Name of the deployment that a run works on."""
    meta = journal.meta()
    run: Any = meta.get("run") or meta
    return str(run.get("deployment_name") or meta.get("deployment_name") or "?")


def attempt_table(attempts: list[AttemptRow]) -> Table:
    """Attempts and where they stand, each with its mechanism (or, where it has none yet, what it tries)."""
    from specpilot.loop.state import mechanism_of  # the loop is slow to import: only who lists attempts waits for it

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("attempt", "mechanism", "component", "state", "why"):
        table.add_column(column, overflow="fold")
    for row in attempts:
        why = f"{row.reason}: {row.detail}" if row.reason else row.detail
        name = mechanism_of(row) or str(row.data.get("task") or "-")
        cells = (row.id, name[:80], row.component, str(row.state), why[:100])
        table.add_row(*(escape(cell) for cell in cells))
    return table
