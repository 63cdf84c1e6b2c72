"""`specpilot gc`: what it offers, what it leaves alone, and that it goes on."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from specpilot.cli.maintenance import Leftover, leftovers
from specpilot.contracts import AttemptState, Reason
from specpilot.errors import RunLockedError
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME, home, models_dir, register_run, runs_dir
from specpilot.run_lock import RunLock
from specpilot.workspace import Workspace
from tests.helpers.command_line import make_run, specpilot
from tests.specpilot.test_engine_tree import TOML


def test_gc_lists_and_removes_leftovers_of_ended_runs_only(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "engine.toml").write_text(TOML)
    run = make_run()
    workspace = Workspace.create(run, tree)
    (workspace.worktree("w", workspace.first_commit) / "new.py").write_text("unsaved")
    assert "nothing to clean" in specpilot("gc").stdout, "an interrupted run keeps its worktrees"
    orphan = subprocess.Popen(["sleep", "100"], start_new_session=True)
    journal = Journal.open(run / JOURNAL_NAME)
    journal.record_process(orphan.pid, orphan.pid, psutil.Process(orphan.pid).create_time(), "server")
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    listed = specpilot("gc").stdout
    assert f"processes {orphan.pid}" in listed and "worktrees of" in listed and "--apply" in listed
    assert orphan.poll() is None and (run / "worktrees/w/new.py").exists()
    with RunLock(run):
        assert "nothing to clean" in specpilot("gc", "--apply").stdout
    assert "removed 2 things" in specpilot("gc", "--apply").stdout
    assert not psutil.pid_exists(orphan.pid)
    orphan.wait(10)
    assert not list((run / "worktrees").iterdir()) and len(list((run / "saved").glob("w-*.patch"))) == 1
    assert "nothing to clean" in specpilot("gc", "--apply").stdout
    aged(run)
    assert "ended 40 days ago" in specpilot("gc", "--older-than", "30", "--apply").stdout
    assert not run.exists()


@pytest.mark.parametrize("days", ["-3", "-0.5", "soon"])
def test_gc_takes_no_negative_age(days: str) -> None:
    make_run()
    done = specpilot("gc", "--older-than", days, "--apply")
    assert done.returncode == 2 and len(list(runs_dir().iterdir())) == 1


def test_gc_spares_the_worktree_of_an_open_outside_attempt(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "engine.toml").write_text(TOML)
    run = make_run()
    workspace = Workspace.create(run, tree)
    for name in ("serve-1", "x-1", "x-2"):
        (workspace.worktree(name, workspace.first_commit) / "new.py").write_text("unsaved")
    journal = Journal.open(run / JOURNAL_NAME)
    for name in ("x-1", "x-2"):
        journal.create_attempt(name, round=0, worker="external")
        journal.move_attempt(name, AttemptState.working)
    journal.move_attempt("x-2", AttemptState.rejected, reason=Reason.withdrawn)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    assert "2 worktrees of" in specpilot("gc").stdout
    assert "removed 1 things" in specpilot("gc", "--apply").stdout
    assert [path.name for path in (run / "worktrees").iterdir()] == ["x-1"]
    assert (run / "worktrees/x-1/new.py").read_text() == "unsaved"
    (run / "worktrees/x-1.brief.txt").write_text("what to do")  # no worktree
    (run / "worktrees/link").symlink_to(tree)
    assert "nothing to clean" in specpilot("gc", "--apply").stdout
    aged(run)
    done = specpilot("gc", "--older-than", "30", "--apply")
    assert "nothing to clean" in done.stdout and f"left alone: {run / 'worktrees/link'} is a link" in done.stdout
    assert (tree / "engine.toml").is_file() and (run / "worktrees/link").is_symlink()


def aged(folder: Path, days: float = 40) -> None:
    """Folder and journal look `days` days old; SQLite's side files go, as after a clean end."""
    for extra in folder.glob(f"{JOURNAL_NAME}-*"):
        extra.unlink()
    for path in (*folder.glob(JOURNAL_NAME), folder):
        os.utime(path, (time.time() - days * 86400,) * 2)


def damage(run: Path) -> None:
    with (run / JOURNAL_NAME).open("r+b") as file:
        file.write(b"not a database at all")


def test_gc_leaves_a_run_alone_whose_journal_is_damaged(tmp_path: Path) -> None:
    run = make_run()
    (run / "repo").mkdir()
    damage(run)
    bare, lost = make_run("20260101-000000-d-bbbb"), make_run("20260101-000000-d-cccc")
    damage(bare)
    (lost / "repo").mkdir()
    (lost / JOURNAL_NAME).unlink()
    half = runs_dir() / "20260101-000000-d-dddd"  # ended before it wrote anything
    half.mkdir()
    (half / "run.lock").touch()
    for folder in (run, bare, lost, half):
        aged(folder)
    done = specpilot("gc", "--apply", "--older-than", "0")
    assert done.returncode == 0 and "removed 1 things" in done.stdout
    assert {path.name for path in runs_dir().iterdir()} == {run.name, bare.name, lost.name}
    for folder in (run, bare):
        assert f"left alone: {folder}: {folder / JOURNAL_NAME} is damaged" in done.stdout
    assert f"left alone: {lost}: " in done.stdout


def test_gc_deletes_no_run_because_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    (run / "repo").mkdir()
    aged(run)

    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("specpilot.journal.sqlite3.connect", full)
    done = specpilot("gc", "--apply")
    assert done.returncode == 0 and "no space left on the disk" in done.stdout and "nothing to clean" in done.stdout
    assert (run / JOURNAL_NAME).is_file() and (run / "repo").is_dir()


def test_gc_finds_runs_that_were_put_elsewhere(tmp_path: Path) -> None:
    elsewhere = make_run().rename(tmp_path / "elsewhere")
    register_run(elsewhere)
    journal = Journal.open(elsewhere / JOURNAL_NAME)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    aged(elsewhere)
    assert "nothing to clean" in specpilot("gc", "--apply").stdout
    with RunLock(elsewhere):
        assert "nothing to clean" in specpilot("gc", "--apply", "--older-than", "30").stdout
    aged(elsewhere)
    assert f"run {elsewhere}, ended 40 days ago" in specpilot("gc", "--apply", "--older-than", "30").stdout
    assert not elsewhere.exists()


def test_gc_follows_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("of years")
    aged(precious)
    run = make_run().rename(tmp_path / "elsewhere")
    journal = Journal.open(run / JOURNAL_NAME)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    aged(run)
    downloads = models_dir() / "downloads"
    downloads.mkdir(parents=True)
    old = models_dir() / ".b.part"
    old.write_text("a file")
    aged(old)
    os.utime(old, (1, 1))
    links = {
        runs_dir() / "notes": precious,
        runs_dir() / "up": home(),
        runs_dir() / "run": run,
        runs_dir() / "nowhere": tmp_path / "nowhere",
        models_dir() / ".a.part": precious,
        models_dir() / ".lost.part": tmp_path / "nowhere",
        downloads / ".part-1": precious,
    }
    for link, to in links.items():
        link.symlink_to(to)
    done = specpilot("gc", "--apply", "--older-than", "30")
    assert done.returncode == 0 and "removed 1 things" in done.stdout and not old.exists()
    for link in links:
        assert f"left alone: {link} is a link" in done.stdout and link.is_symlink()
    assert (precious / "thesis").read_text() == "of years" and (run / JOURNAL_NAME).is_file()


def test_gc_goes_on_when_one_thing_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [models_dir() / f".{name}.part" for name in "ab"]
    for part in parts:
        part.mkdir(parents=True)
        aged(part)
    real = shutil.rmtree

    def refuse(path: Path) -> None:
        if path == parts[0]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path)

    monkeypatch.setattr("specpilot.cli.maintenance.shutil.rmtree", refuse)
    done = specpilot("gc", "--apply")
    assert done.returncode == 3 and f"not removed: half-made download {parts[0]}" in done.stdout
    assert "removed 1 things" in done.stdout and parts[0].exists() and not parts[1].exists()


@pytest.mark.parametrize(
    "state", [AttemptState.submitted, AttemptState.measured, AttemptState.gated, AttemptState.accepted]
)
def test_gc_keeps_a_run_with_an_unfinished_outside_attempt(state: AttemptState) -> None:
    run = make_run()
    journal = Journal.open(run / JOURNAL_NAME)
    journal.create_attempt("x-1", round=0, worker="external")
    for step in list(AttemptState)[1 : list(AttemptState).index(state) + 1]:
        journal.move_attempt("x-1", step)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    aged(run)
    assert "nothing to clean" in specpilot("gc", "--older-than", "30", "--apply").stdout
    assert (run / JOURNAL_NAME).is_file()


def test_gc_removes_no_run_that_was_taken_up_since_it_was_listed() -> None:
    run = make_run()
    journal = Journal.open(run / JOURNAL_NAME)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    aged(run)
    (found,) = leftovers(30)
    assert isinstance(found, Leftover)
    with RunLock(run), pytest.raises(RunLockedError, match="in use by"):
        found.remove()
    journal = Journal.open(run / JOURNAL_NAME)
    journal.create_attempt("x-1", round=0, worker="external")
    journal.close()
    with pytest.raises(RunLockedError, match="taken up"):
        found.remove()
    assert (run / JOURNAL_NAME).is_file()
