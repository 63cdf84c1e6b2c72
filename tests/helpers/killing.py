"""Kill a run's whole process group at chosen moments, resume it, and say what is left: for tests and experiments/kill_resume."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from specpilot.git import run_git
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME
from specpilot.workspace import Workspace

COMMAND = [sys.executable, "-c", "from specpilot.cli import main; main()"]


@dataclass(frozen=True)
class Started:
    """A moment in a run's life that does not depend on the speed of the machine: the first at which its journal has begun
    so many steps and an engine is at work."""

    steps: int


@dataclass
class State:
    """What must be the same however often a run was killed."""

    attempts: dict[str, tuple[str, str | None]]
    merged: list[str]
    files: dict[str, str]
    """Path to git blob id of the best engine."""
    stop: str


@dataclass
class Killed:
    """One disturbed run."""

    kills: list[float | Started] = field(default_factory=list)
    """When each life was killed, as it was asked for."""
    repeated: dict[str, int] = field(default_factory=dict)
    """Finished steps that a later life started again (must be empty)."""
    survivors: list[str] = field(default_factory=list)
    """Processes still there 5 s after a kill (must be empty)."""
    exit_code: int | None = None


def state_of(run_dir: Path) -> State:
    """Reads a run at rest."""
    journal = Journal.open(run_dir / JOURNAL_NAME)
    workspace = Workspace.open(run_dir)
    rows = journal.attempts()
    listing = run_git(["ls-tree", "-r", workspace.best()], cwd=run_dir / "repo").stdout
    state = State(
        attempts={row.id: (row.state.value, row.reason.value if row.reason else None) for row in rows},
        merged=[str(row.data.get("mechanism")) for row in rows if row.state.value == "merged"],
        files={line.split("\t")[1]: line.split()[2] for line in listing.splitlines()},
        stop=str(journal.meta().get("stop_reason")),
    )
    journal.close()
    return state


def run_with_kills(
    deployment: Path,
    run_dir: Path,
    moments: Sequence[float | Started],
    *,
    arguments: list[str],
    environment: dict[str, str],
) -> Killed:
    """Starts the run, kills its process group at `moments[i]` (seconds into life i, or `Started`), then lets a last life end by itself."""
    result = Killed()
    finished: dict[str, int] = {}
    for moment in [*moments, None]:
        process = _start(deployment, run_dir, arguments, environment)
        if _comes(moment, process, run_dir / JOURNAL_NAME):
            assert moment is not None
            marked = _descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result.kills.append(moment)
            result.survivors += _still_there(marked)
        else:
            result.exit_code = process.returncode
        starts = _starts(run_dir)
        result.repeated |= {key: n for key, n in starts.items() if key in finished and n != finished[key]}
        finished = {key: starts[key] for key in _finished(run_dir)}
        if result.exit_code is not None:
            break
    return result


def _start(
    deployment: Path, run_dir: Path, arguments: list[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    began = (run_dir / JOURNAL_NAME).exists()
    words = ["resume", str(run_dir), "--plain"]
    if not began:
        words = ["optimize", "--deployment", str(deployment), "--run-dir", str(run_dir), "--plain", *arguments]
    with (run_dir.parent / f"{run_dir.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*COMMAND, *words], stdout=log, stderr=log, start_new_session=True, env={**os.environ, **environment}
        )


def _comes(moment: float | Started | None, process: subprocess.Popen[bytes], journal: Path) -> bool:
    """Waits for a moment of this life; False if the process ended before it. None never comes."""
    began = time.monotonic()
    while process.poll() is None:
        if isinstance(moment, Started):
            if _at_work(journal, moment.steps):
                return True
        elif moment is not None and time.monotonic() - began >= moment:
            return True
        time.sleep(0.005)
    return False


def _at_work(journal: Path, steps: int) -> bool:
    """Whether a journal holds so many steps, begun or finished, and a process that lives; read from beside the run."""
    if not journal.exists():
        return False
    connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=5.0)
    try:
        begun, living = connection.execute(
            "SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM processes WHERE ended_at IS NULL)"
        ).fetchone()
        return bool(begun >= steps and living)
    except sqlite3.OperationalError:  # not written yet
        return False
    finally:
        connection.close()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _still_there(processes: list[psutil.Process]) -> list[str]:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and any(_alive(process) for process in processes):
        time.sleep(0.05)
    return [str(process) for process in processes if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _starts(run_dir: Path) -> dict[str, int]:
    return {row.key: row.starts for row in _steps(run_dir)}


def _finished(run_dir: Path) -> list[str]:
    return [row.key for row in _steps(run_dir) if row.finished]


def _steps(run_dir: Path) -> list:
    if not (run_dir / JOURNAL_NAME).exists():
        return []
    journal = Journal.open(run_dir / JOURNAL_NAME)
    try:
        return journal.steps()
    finally:
        journal.close()
