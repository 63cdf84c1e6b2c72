"""`specpilot gc`: what earlier runs left, and its removal. Nothing of a run in progress is touched."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer

from specpilot.cli.options import folder_size, size_text
from specpilot.contracts import AttemptState
from specpilot.errors import DiskFullError, EnvironmentProblem, RunLockedError, SpecPilotError, TamperedEvidenceError
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME, all_runs, home, models_dir, runs_dir
from specpilot.run_lock import RunLock
from specpilot.sandbox import kill_leftovers
from specpilot.workspace import Workspace

_PASSES = 3
"""Times that gc tries what a full disk kept from being removed: the room that one thing leaves lets another save its work."""
_ENDED = {AttemptState.rejected, AttemptState.superseded, AttemptState.merged}


@dataclass(frozen=True)
class Leftover:
    """One thing that can go."""

    what: str
    size: int
    remove: Callable[[], object]
    saves: bool = False
    """It may write before it goes, which takes room."""


@dataclass(frozen=True)
class Unclear:
    """A link, or a folder that cannot be looked into: named, and left for its owner to judge."""

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
    for item in found if not apply else ():
        typer.echo(f"found: {item.what} ({size_text(item.size)})")
    if not found:
        typer.echo("nothing to clean")
    elif apply:
        _remove(found)
    else:
        total = size_text(sum(item.size for item in found))
        typer.echo(f"{len(found)} things, {total}; `specpilot gc --apply` removes them")


def _remove(found: list[Leftover]) -> None:
    """Remove what can be removed, first what needs no room for it. Raises `EnvironmentProblem` at the end for what could not."""
    gone, failed = [], 0
    pending = sorted(found, key=lambda item: item.saves)
    for left in reversed(range(_PASSES)):
        again = []
        for item in pending:
            typer.echo(f"removing: {item.what} ({size_text(item.size)})")
            try:
                item.remove()
            except RunLockedError as error:  # somebody began to work on it since it was listed
                typer.echo(f"left alone: {error.message}")
            except (OSError, SpecPilotError) as error:
                if left and isinstance(error, DiskFullError):
                    again.append(item)
                    continue
                failed += 1
                typer.echo(f"not removed: {item.what}: {error.message if isinstance(error, SpecPilotError) else error}")
            else:
                gone.append(item)
        pending = again
    typer.echo(f"removed {len(gone)} things, {size_text(sum(item.size for item in gone))}")
    if failed:
        raise EnvironmentProblem(f"{failed} things could not be removed", "see the lines `not removed` above.")


def leftovers(older_than_days: float | None = None) -> Iterator[Leftover | Unclear]:
    """Everything that can go, found afresh, in the runs folder and in those of `optimize --run-dir`.

    A link is never followed and never offered: what it leads to is not ours.
    """
    inside = [*runs_dir().iterdir()] if runs_dir().is_dir() else []
    seen = set()
    for path in sorted({*inside, *all_runs()}):
        try:
            if _linked(path):
                yield Unclear(f"{path} is a link, or lies behind one")
                continue
            folder = path.resolve()
            if not folder.is_dir() or folder in seen:
                continue
            seen.add(folder)
            if home().resolve().is_relative_to(folder):
                yield Unclear(f"{folder} holds all that SpecPilot keeps")
            elif RunLock.holder(folder) is None:
                yield from _of_run(folder, older_than_days)
        except OSError as error:  # somebody else's folder, a disk that is gone
            yield Unclear(f"{path}: {error.strerror or error}")
    if models_dir().is_dir():
        yield from _half_made()


def _half_made() -> Iterator[Leftover | Unclear]:
    downloads = models_dir() / "downloads"
    if downloads.is_symlink():
        yield Unclear(f"{downloads} is a link")
    inner = [] if downloads.is_symlink() else downloads.glob(".part-*")
    for path in [*models_dir().glob(".*.part"), *inner]:
        try:
            if path.is_symlink():
                yield Unclear(f"{path} is a link")
            elif not _recent(path):
                size = folder_size(path) if path.is_dir() else path.lstat().st_size
                yield Leftover(f"half-made download {path}", size, partial(_delete, path))
        except OSError as error:
            yield Unclear(f"{path}: {error.strerror or error}")


def _of_run(folder: Path, older_than_days: float | None) -> Iterator[Leftover | Unclear]:
    if not _holds_something(folder):
        if not _recent(folder):
            what = f"{folder}, which holds no run"
            yield Leftover(what, folder_size(folder), partial(_remove_run, folder))
        return
    name = folder.name if folder.parent == runs_dir().resolve() else str(folder)
    try:
        journal = _journal(folder)
    except TamperedEvidenceError:
        return  # whoever looks into it wants it as it is
    except SpecPilotError as error:  # a damaged journal beside good commits, a full disk: no reason to delete a run
        yield Unclear(f"{folder}: {error.message}")
        return
    recorded = [(row.pid, row.pgid, row.start_time) for row in journal.live_processes()]
    ended = journal.get_meta("stop_reason") is not None
    kept = journal.open_outside()
    unfinished = _unfinished_outside(journal)
    journal.close()
    alive = [row for row in recorded if _is_alive(row[0], row[2])]
    if alive:
        pids = ", ".join(str(row[0]) for row in alive)
        yield Leftover(f"processes {pids} of {name}, whose run is gone", 0, lambda: kill_leftovers(alive))
    age_days = (time.time() - (folder / JOURNAL_NAME).stat().st_mtime) / 86400
    if older_than_days is not None and ended and not unfinished and age_days > older_than_days:
        what = f"run {name}, ended {age_days:.0f} days ago"
        yield Leftover(what, folder_size(folder), partial(_remove_run, folder))
        return
    worktrees = folder / "worktrees"
    standing = [*worktrees.iterdir()] if worktrees.is_dir() and not worktrees.is_symlink() else []
    links = {path.name for path in standing if path.is_symlink()}
    for link in [worktrees] if worktrees.is_symlink() else [worktrees / name for name in sorted(links)]:
        yield Unclear(f"{link} is a link")
    if ended and (found := [path for path in standing if path.is_dir() and path.name not in kept | links]):
        spared = f"; those of open attempts ({', '.join(sorted(kept))}) too" if kept else ""
        yield Leftover(
            f"{len(found)} worktrees of {name} (its commits stay{spared})",
            sum(folder_size(path) for path in found),
            partial(_prune, folder, links),
            saves=True,
        )


def _journal(folder: Path) -> Journal:
    """The journal of a run that nobody works on, to be read; also where the disk is full."""
    try:
        return Journal.open(folder / JOURNAL_NAME)
    except DiskFullError:
        return Journal.open(folder / JOURNAL_NAME, alone=True)


def _holds_something(folder: Path) -> bool:
    return (folder / JOURNAL_NAME).exists() or (folder / "repo").exists()


def _unfinished_outside(journal: Journal) -> set[str]:
    """Attempts of outsiders without a verdict: their work may be nowhere else, whether or not it has been handed in."""
    return {row.id for row in journal.attempts() if row.worker == "external" and row.state not in _ENDED}


def _remove_run(folder: Path) -> None:
    """Remove a run folder while nobody can begin to work on it. Raises `RunLockedError` if somebody has."""
    with RunLock(folder):
        if _holds_something(folder):
            journal = _journal(folder)
            busy = _unfinished_outside(journal) or journal.get_meta("stop_reason") is None
            journal.close()
            if busy:
                raise RunLockedError(f"{folder} was taken up again", "")
        _delete(folder)


def _prune(folder: Path, links: set[str]) -> None:
    """Remove the worktrees of an ended run, but for those that outsiders work in at this moment."""
    with RunLock(folder):
        journal = _journal(folder)
        kept = journal.open_outside()
        journal.close()
        Workspace.open(folder).prune_unknown(kept | links)


def _delete(path: Path) -> None:
    """Remove a file or a whole folder; links inside go, what they lead to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _linked(path: Path) -> bool:
    """Whether a link stands between us and a run's folder. The runs folder itself may be one: its owner set it."""
    if path.is_symlink():
        return True
    own = runs_dir().resolve() / path.name if path.parent == runs_dir() else path
    return path.resolve() != own


def _is_alive(pid: int, start_time: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - start_time) < 0.02
    except psutil.Error:
        return False


def _recent(path: Path) -> bool:
    """Changed within the last hour: somebody may be at work on it."""
    return time.time() - path.stat().st_mtime < 3600
