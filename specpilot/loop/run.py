"""The front of the loop: start a run, go on with one, and say how it ended.

A run is a folder. Everything in it is made by this process or its children; everything that was paid for is in its
journal. `optimize` and `resume` are the same workflow: finished steps are read, unfinished ones are done.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot import __version__
from specpilot.contracts import StopReason
from specpilot.deployment import Deployment, parse_deployment
from specpilot.errors import (
    GateUnsoundError,
    InfrastructureError,
    RunFolderError,
    RunLockedError,
    SpecPilotError,
    disk_full_named,
)
from specpilot.evidence import check_run, seal_file
from specpilot.journal import Journal
from specpilot.loop.budget import EXPECTED_ASSESS_S, BudgetClock, extend, in_force
from specpilot.loop.context import RunContext
from specpilot.loop.external import finish_judging
from specpilot.loop.finish import finish
from specpilot.loop.learn import learn_realised
from specpilot.loop.leave_one_out import leave_one_out
from specpilot.loop.observe import observe
from specpilot.loop.prepare import first_baselines, prepare
from specpilot.loop.records import Prepared, RunMeta
from specpilot.loop.rounds import run_round
from specpilot.loop.state import head_of, merged_mechanisms
from specpilot.memory import MemoryStore
from specpilot.models import ensure_models
from specpilot.paths import JOURNAL_NAME, home, memory_url, register_run, runs_dir
from specpilot.report.view import RunView
from specpilot.run_lock import RunLock
from specpilot.sandbox import kill_leftovers
from specpilot.workspace import Workspace

EXIT_CODES = {
    StopReason.infrastructure: 9,
    StopReason.gate_unsound: 7,
    StopReason.interrupted: 130,
}


@dataclass(frozen=True)
class Outcome:
    """How a command on a run ended."""

    run_dir: Path
    stop: StopReason
    final: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 for a complete run; see `specpilot.errors` for the others."""
        return 0 if self.stop.complete else EXIT_CODES[self.stop]


def optimize(
    deployment: Deployment,
    folder: Path,
    *,
    source: Path | None = None,
    plain: bool = False,
    memory: str | None = None,
) -> Outcome:
    """Begins a run in `folder` and works until it ends. `source` is the deployment's file; `memory` an SQLAlchemy URL.

    Raises `RunFolderError` when the folder holds a run (resume it) or anything else, `RunLockedError` when one is alive.
    """
    _require_free(folder)
    with disk_full_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder):
        meta = RunMeta(
            run_id=folder.name,
            deployment_name=deployment.name,
            deployment_path=str(source or deployment.folder),
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            secret=secrets.token_hex(16),
            version=__version__,
            memory_url=memory or memory_url(),
        )
        values = {"run": meta.model_dump(), "deployment": deployment.to_yaml(), "folder": str(deployment.folder)}
        with disk_full_named(home()):
            register_run(folder)
        journal = Journal.create(folder / JOURNAL_NAME, values)
        with disk_full_named(folder):
            (folder / "deployment.yaml").write_text(deployment.to_yaml(), encoding="utf-8")
        return _work(folder, journal, plain=plain)


def _require_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, not a folder", "give a new folder as --run-dir.")
    if holder := RunLock.holder(folder):
        raise RunLockedError(f"{folder} is in use by {holder}", "wait for it, or give another --run-dir.")
    if (folder / JOURNAL_NAME).exists():
        raise RunFolderError(
            f"{folder} already holds a run", f"`specpilot resume {folder}`, or give another --run-dir."
        )
    if folder.exists() and any(item.name != "run.lock" for item in folder.iterdir()):
        raise RunFolderError(f"{folder} is not an empty folder", "give a new folder as --run-dir.")


def resume(run_dir: Path, *, plain: bool = False, minutes: float | None = None, rounds: int | None = None) -> Outcome:
    """Goes on with a run: no finished step is repeated. A run that had ended is finished again for free.

    `minutes` and `rounds` give it more of each first (see `budget.extend`); what they set holds for later resumes, too.
    """
    if not (run_dir / JOURNAL_NAME).exists():
        raise RunFolderError(f"{run_dir} holds no run", "`specpilot runs` lists them.")
    with RunLock(run_dir):
        journal = Journal.open(run_dir / JOURNAL_NAME)
        if minutes is not None or rounds is not None:
            extend(_deployment(run_dir, journal.meta()).budget, journal, minutes, rounds)
        return _work(run_dir, journal, plain=plain)


@contextmanager
def open_run(run_dir: Path, *, plain: bool = True) -> Iterator[RunContext]:
    """A run at rest, ready for `attempt`, `report` and `export`: nothing is started, no lock is taken."""
    if not (run_dir / JOURNAL_NAME).exists():
        raise RunFolderError(f"{run_dir} holds no run", "`specpilot runs` lists them.")
    context = _context(run_dir, Journal.open(run_dir / JOURNAL_NAME), plain=plain)
    try:
        if not context.journal.finished("preflight"):
            raise RunFolderError(f"{run_dir} has not been prepared", f"specpilot resume {run_dir}")
        context.models = ensure_models(context.deployment)
        context.workspace = Workspace.open(run_dir, recover=False)
        check_run(run_dir, context.journal, context.workspace)
        context.prepared = context.journal.result("preflight", Prepared)
        yield context
    finally:
        context.memory.close()
        context.journal.close()


def _deployment(run_dir: Path, meta: dict[str, Any]) -> Deployment:
    """The deployment as it was when the run began."""
    return parse_deployment(meta["deployment"], Path(meta["folder"]), str(run_dir / "deployment.yaml"))


def _context(run_dir: Path, journal: Journal, *, plain: bool) -> RunContext:
    meta = journal.meta()
    run = RunMeta.model_validate(meta["run"])
    deployment = _deployment(run_dir, meta)
    deployment = deployment.model_copy(update={"budget": in_force(deployment.budget, journal)})
    session = int(meta.get("sessions", 0)) + 1
    journal.set_meta("sessions", session)
    return RunContext(
        run_dir=run_dir,
        deployment=deployment,
        meta=run,
        journal=journal,
        view=RunView(
            deployment=deployment.name,
            run_id=run.run_id,
            run_dir=run_dir,
            plain=plain,
            limit_s=(deployment.budget.wall_clock_minutes or 0) * 60 or None,
        ),
        budget=BudgetClock(deployment.budget, journal),
        memory=MemoryStore(run.memory_url),
        session=session,
    )


def _work(run_dir: Path, journal: Journal, *, plain: bool) -> Outcome:
    end_leftovers(journal)
    _check_evidence(run_dir, journal)
    context = _context(run_dir, journal, plain=plain)
    with context.view, _terminate_as_interrupt():
        context.view.event(
            "budget", {"elapsed_s": context.budget.elapsed_s(), "rounds": context.deployment.budget.rounds}
        )
        try:
            return _workflow(context)
        except KeyboardInterrupt:
            return _ended(context, StopReason.interrupted)
        except GateUnsoundError:
            _ended(context, StopReason.gate_unsound)
            raise
        except InfrastructureError:
            _ended(context, StopReason.infrastructure)
            raise
        except SpecPilotError as error:
            context.say("note", level="error", text=error.message)
            raise
        finally:
            context.budget.save()
            _tidy(context)
            context.memory.close()
            journal.close()


def _check_evidence(run_dir: Path, journal: Journal) -> None:
    """What an earlier life of the run left must be as it left it; a run that only begins has nothing yet."""
    there = (run_dir / "repo" / ".git").is_dir()
    check_run(run_dir, journal, Workspace.open(run_dir) if there else None)


def _workflow(context: RunContext) -> Outcome:
    """The whole run. Reads like a list because every line is a durable step or a function of durable steps."""
    prepare(context)
    first_baselines(context)
    finish_judging(context)
    stop = StopReason.rounds_done
    for number in range(1, context.deployment.budget.rounds + 1):
        result = run_round(context, number, merged_mechanisms(context))
        if result.stop is not None:
            given_more = result.stop is StopReason.budget_wall_clock and not context.budget.may_start(EXPECTED_ASSESS_S)
            if given_more:  # since that round ended: what it could not measure is proposed again
                continue
            stop = result.stop
            break
    if context.deployment.budget.rounds == 0:
        observe(context, "r0/observe", context.trees.first_commit, "stock")
    head = leave_one_out(context, head_of(context))  # attempts from outside may have gone further
    idle = context.deployment.budget.rounds == 0 and head == context.trees.first_commit
    if idle:
        context.journal.set_meta("stop_reason", stop.value)
    four = (
        {} if idle else finish(context, head, stop)
    )  # it writes the stop reason once the closing session is on record
    learn_realised(context)
    outcome = Outcome(context.run_dir, stop, four)
    _report(context, outcome)
    return outcome


def _report(context: RunContext, outcome: Outcome) -> None:
    from specpilot.loop.summary import report_data
    from specpilot.report.html import write_report

    data = report_data(context)
    path = write_report(data, context.run_dir / "report.html")
    seal_file(context.journal, context.run_dir, path)
    context.view.event("done", {"stop": outcome.stop.value, "report": str(path), "data": data})


def _ended(context: RunContext, stop: StopReason) -> Outcome:
    context.journal.set_meta("stop_reason", stop.value)
    run = context.meta.run_id if context.run_dir.parent == runs_dir() else str(context.run_dir)
    context.say("ended", stop=stop.value, resume="" if stop is StopReason.gate_unsound else f"specpilot resume {run}")
    return Outcome(context.run_dir, stop)


def end_leftovers(journal: Journal) -> None:
    """Ends engines that an earlier life of the run left behind."""
    rows = journal.live_processes()
    kill_leftovers((row.pid, row.pgid, row.start_time) for row in rows)
    for row in rows:
        journal.end_process(row.pid, row.start_time)


def _tidy(context: RunContext) -> None:
    """Ends what still runs and removes worktrees that nobody needs; an open outside attempt keeps its own."""
    end_leftovers(context.journal)
    if context.workspace is None:
        return
    context.workspace.prune_unknown(context.journal.open_outside())


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run the way Ctrl-C does: state written, engines ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


__all__ = ["Outcome", "end_leftovers", "open_run", "optimize", "resume"]
