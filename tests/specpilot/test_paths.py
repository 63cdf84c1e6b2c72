"""Everything under one home; a run is found by id, prefix, path or `latest`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specpilot import paths
from specpilot.errors import RunFolderError, UsageError


def make_run(name: str, age: float = 0.0) -> Path:
    folder = paths.runs_dir() / name
    folder.mkdir(parents=True)
    journal = folder / paths.JOURNAL_NAME
    journal.touch()
    os.utime(journal, (1_000_000 - age, 1_000_000 - age))
    return folder


def test_home_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "h"))
    assert paths.home() == tmp_path / "h"
    assert paths.runs_dir() == tmp_path / "h" / "runs"
    assert paths.memory_url() == f"sqlite:///{tmp_path}/h/memory.db"
    assert not (tmp_path / "h").exists(), "computing a path creates nothing"
    monkeypatch.setenv("SPECPILOT_HOME", "relative")
    with pytest.raises(UsageError, match="absolute"):
        paths.home()
    monkeypatch.delenv("SPECPILOT_HOME")
    assert paths.home() == Path.home() / ".specpilot"


def test_memory_url_can_be_any_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_MEMORY_URL", "postgresql://team/memory")
    assert paths.memory_url() == "postgresql://team/memory"


def test_the_memory_room_agrees_on_the_default_url() -> None:
    from specpilot.memory.database import default_url

    assert default_url() == paths.memory_url()


def test_runs_are_found(tmp_path: Path) -> None:
    old, new = make_run("20260101-a", age=50), make_run("20260102-b")
    assert paths.find_run("20260101-a") == old
    assert paths.find_run("20260102") == new
    assert paths.find_run(str(old)) == old
    assert paths.find_run("latest") == new
    os.utime(old / paths.JOURNAL_NAME, (2_000_000, 2_000_000))
    assert paths.find_run("latest") == old


def test_bad_run_names_say_why(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run under"):
        paths.find_run("latest")
    make_run("20260101-a"), make_run("20260101-b")
    with pytest.raises(RunFolderError, match="names 2 runs"):
        paths.find_run("20260101")
    with pytest.raises(RunFolderError, match="no run named"):
        paths.find_run("nope")
    with pytest.raises(RunFolderError, match="not a run folder"):
        paths.find_run(str(tmp_path))
