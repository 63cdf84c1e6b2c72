"""`specpilot gc`: what earlier runs left, and its removal. Nothing of a run in progress is touched."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from specpilot.cli.options import folder_size, size_text
from specpilot.errors import SpecPilotError, TamperedEvidenceError
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME, all_runs, models_dir, runs_dir
from specpilot.run_lock import RunLock
from specpilot.sandbox import kill_leftovers
from specpilot.workspace import Workspace


@dataclass(frozen=True)
class Leftover:
    """One thing that can go."""

    what: str
    size: int
    remove: Callable[[], object]


@dataclass(frozen=True)
class Unclear:
    """A folder that cannot be looked into: named, and left for its owner to judge."""

    what: str


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gc")(gc)


def gc(
    apply: Annotated[bool, typer.Option("--apply", help="Remove them; without it they are only listed.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0.0, help="Also whole runs that ended so long ago and have no open attempt."),
    ] = None,
) -> None:
    """List (or remove) leftover processes, worktrees of ended runs, and half-made downloads.

    Uncommitted work in a worktree is saved as a patch in the run's saved/ folder first.
    """
    seen = list(leftovers(older_than))
    for unclear in seen:
        if isinstance(unclear, Unclear):
            typer.echo(f"left alone: {unclear.what}")
    found = [item for item in seen if isinstance(item, Leftover)]
    for item in found:
        typer.echo(f"{'removing' if apply else 'found'}: {item.what} ({size_text(item.size)})")
        if apply:
            item.remove()
    total = size_text(sum(item.size for item in found))
    if not found:
        typer.echo("nothing to clean")
    elif apply:
        typer.echo(f"removed {len(found)} things, {total}")
    else:
        typer.echo(f"{len(found)} things, {total}; `specpilot gc --apply` removes them")


def leftovers(older_than_days: float | None = None) -> Iterator[Leftover | Unclear]:
    """Everything that can go, found afresh, in the runs folder and in those of `optimize --run-dir`."""
    inside = [path for path in runs_dir().iterdir() if path.is_dir()] if runs_dir().is_dir() else []
    for folder in sorted({path.resolve() for path in (*inside, *all_runs())}):
        try:
            if RunLock.holder(folder) is None:
                yield from _of_run(folder, older_than_days)
        except OSError as error:  # somebody else's folder, a disk that is gone
            yield Unclear(f"{folder}: {error.strerror or error}")
    if models_dir().is_dir():
        for path in [*models_dir().glob(".*.part"), *(models_dir() / "downloads").glob(".part-*")]:
            if not _recent(path):
                yield Leftover(f"half-made download {path}", folder_size(path), lambda p=path: shutil.rmtree(p))  # type: ignore[misc]


def _of_run(folder: Path, older_than_days: float | None) -> Iterator[Leftover | Unclear]:
    if not (folder / JOURNAL_NAME).exists() and not (folder / "repo").exists():
        if not _recent(folder):
            yield Leftover(f"{folder}, which holds no run", folder_size(folder), lambda: shutil.rmtree(folder))
        return
    try:
        journal = Journal.open(folder / JOURNAL_NAME)
    except TamperedEvidenceError:
        return  # whoever looks into it wants it as it is
    except SpecPilotError as error:  # a damaged journal beside good commits, a full disk: no reason to delete a run
        yield Unclear(f"{folder}: {error.message}")
        return
    recorded = [(row.pid, row.pgid, row.start_time) for row in journal.live_processes()]
    ended = journal.get_meta("stop_reason") is not None
    kept = journal.open_outside()
    journal.close()
    alive = [row for row in recorded if _is_alive(row[0], row[2])]
    if alive:
        pids = ", ".join(str(row[0]) for row in alive)
        yield Leftover(f"processes {pids} of {folder.name}, whose run is gone", 0, lambda: kill_leftovers(alive))
    age_days = (time.time() - (folder / JOURNAL_NAME).stat().st_mtime) / 86400
    if older_than_days is not None and ended and not kept and age_days > older_than_days:
        yield Leftover(
            f"run {folder.name}, ended {age_days:.0f} days ago", folder_size(folder), lambda: shutil.rmtree(folder)
        )
        return
    worktrees = folder / "worktrees"
    standing = [path for path in worktrees.iterdir() if path.is_dir()] if worktrees.is_dir() else []
    if ended and (found := [path for path in standing if path.name not in kept]):
        spared = f"; those of open attempts ({', '.join(sorted(kept))}) too" if kept else ""
        yield Leftover(
            f"{len(found)} worktrees of {folder.name} (its commits stay{spared})",
            sum(folder_size(path) for path in found),
            lambda: Workspace.open(folder).prune_unknown(kept),
        )


def _is_alive(pid: int, start_time: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - start_time) < 0.02
    except psutil.Error:
        return False


def _recent(path: Path) -> bool:
    """Changed within the last hour: somebody may be at work on it."""
    return time.time() - path.stat().st_mtime < 3600
