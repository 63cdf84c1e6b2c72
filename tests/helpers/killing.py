"""Kill a run's whole process group at chosen moments, resume it, and say what is left: for tests and experiments/kill_resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME
from specpilot.workspace import Workspace

COMMAND = [sys.executable, "-c", "from specpilot.cli import main; main()"]


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

    kills: list[float] = field(default_factory=list)
    """Seconds after the start of each life at which it was killed."""
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
    listing = workspace._git("ls-tree", "-r", workspace.best())
    state = State(
        attempts={row.id: (row.state.value, row.reason.value if row.reason else None) for row in rows},
        merged=[str(row.data.get("mechanism")) for row in rows if row.state.value == "merged"],
        files={line.split("\t")[1]: line.split()[2] for line in listing.splitlines()},
        stop=str(journal.meta().get("stop_reason")),
    )
    journal.close()
    return state


def run_with_kills(
    deployment: Path, run_dir: Path, after: list[float], *, arguments: list[str], environment: dict[str, str]
) -> Killed:
    """Starts the run, kills its process group `after[i]` seconds into life i, then lets a last life end by itself."""
    result = Killed()
    finished: dict[str, int] = {}
    for delay in [*after, None]:
        process = _start(deployment, run_dir, arguments, environment)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            assert delay is not None
            marked = _descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result.kills.append(delay)
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


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _still_there(processes: list[psutil.Process]) -> list[str]:
    deadline = time.monotonic() + 5.0
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
