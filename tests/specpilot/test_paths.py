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


def test_runs_kept_elsewhere_are_known(tmp_path: Path) -> None:
    inside = make_run("20260101-inside", age=50)
    here, gone, awkward = tmp_path / "here", tmp_path / "gone", tmp_path / 'a "name"\nof two lines'
    for folder in (here, gone, awkward, inside):
        folder.mkdir(exist_ok=True)
        (folder / paths.JOURNAL_NAME).touch()
        paths.register_run(folder)
        paths.register_run(folder)
    assert len(paths.run_index().read_text().splitlines()) == 3, "each once, and none that lies in the home anyway"
    assert set(paths.all_runs()) == {inside, here, gone, awkward}
    os.utime(here / paths.JOURNAL_NAME, (3_000_000_000, 3_000_000_000))
    assert paths.find_run("latest") == here == paths.find_run("here")
    (gone / paths.JOURNAL_NAME).unlink()
    gone.rmdir()
    with paths.run_index().open("ab") as file:
        file.write(b'"relative"\n{}\n\xff\n"cut off in the mid')
    assert set(paths.all_runs()) == {inside, here, awkward}
    with pytest.raises(RunFolderError, match="no run named 'gone'"):
        paths.find_run("gone")


def test_an_index_that_cannot_be_read_is_passed_over() -> None:
    paths.run_index().mkdir(parents=True)
    assert paths.all_runs() == []
