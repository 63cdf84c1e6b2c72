"""`specpilot gc` on a disk without one free byte: a small file system of its own, filled to the brim."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.specpilot.test_engine_tree import TOML

ROOT = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs -o size=6m tmpfs "$SPECPILOT_HOME"'

SCENE = """
import os, sys, time
from pathlib import Path
from specpilot.cli import main
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME, home, runs_dir
from specpilot.workspace import Workspace
from tests.helpers.command_line import make_run
for letter in "abc":
    run = make_run(f"20260101-000000-{letter}")
    workspace = Workspace.create(run, Path(sys.argv[1]))
    for name in ("one", "two"):
        tree = workspace.worktree(name, workspace.first_commit)
        if letter == "a" or (letter, name) == ("b", "one"):
            (tree / "work.bin").write_bytes(os.urandom(150_000))
    journal = Journal.open(run / JOURNAL_NAME)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    if letter == "c":
        (run / "log").write_bytes(bytes(int(sys.argv.pop(2))))
        for path in (run / JOURNAL_NAME, run):
            os.utime(path, (time.time() - 40 * 86400,) * 2)
filler = os.open(home() / "fill", os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(filler, bytes(4096))
except OSError:
    os.close(filler)
assert os.statvfs(home()).f_bavail == 0
try:
    main(sys.argv[2:])
finally:
    free = os.statvfs(home())
    print("free", free.f_bavail * free.f_frsize)
    print("runs", sorted(path.name[-1] for path in runs_dir().iterdir()))
    print("trees", sorted(f"{p.parent.parent.name[-1]}/{p.name}" for p in runs_dir().glob("*/worktrees/*")))
    print("saved", sorted(f"{p.parent.parent.name[-1]}/{p.stat().st_size > 150_000}" for p in runs_dir().glob("*/saved/*")))
"""


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    env = {**os.environ, "SPECPILOT_HOME": str(folder)}
    return subprocess.run(["unshare", "-rm", "sh", "-c", MOUNT], env=env, capture_output=True).returncode == 0


def _gc(tmp_path: Path, size: int, *words: str) -> tuple[int, str]:
    """Exit code and output of gc on the full disk; `size`: bytes that the old run holds beside its trees."""
    if not _may_mount(tmp_path):
        pytest.skip("needs unshare, and leave to mount a tmpfs")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/engine.toml").write_text(TOML)
    (tmp_path / "home").mkdir()
    (tmp_path / "scene.py").write_text(SCENE)
    command = f'{MOUNT} && exec "$@"'
    scene = [sys.executable, str(tmp_path / "scene.py"), str(tmp_path / "tree"), str(size), "gc", *words]
    env = {**os.environ, "SPECPILOT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", *scene], env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_gc_sees_what_runs_hold_though_the_disk_is_full(tmp_path: Path) -> None:
    code, said = _gc(tmp_path, 0)
    assert code == 0 and "left alone" not in said, said
    assert said.count("2 worktrees of") == 3


@pytest.mark.parametrize(("size", "all_saved"), [(0, False), (2_000_000, True)])
def test_gc_frees_a_full_disk_and_loses_no_work(tmp_path: Path, size: int, all_saved: bool) -> None:
    """The old run goes first, though its name is last: that room lets the others' work be saved, if it is enough."""
    code, said = _gc(tmp_path, size, "--apply", "--older-than", "30")
    assert "runs ['a', 'b']" in said, said
    assert int(said.split("free ")[1].split()[0]) > 0, said
    for tree in ("b/two", "c/one", "c/two"):  # nothing in them needs saving
        assert tree not in said.split("\ntrees ")[1], said
    saved, standing = said.split("\nsaved ")[1], said.split("\ntrees ")[1].split("\nsaved ")[0]
    assert saved.count("True") + standing.count("/") == 3 and "False" not in saved, f"work was lost: {said}"
    assert all_saved == (standing.count("/") == 0), said
    assert code == (0 if all_saved else 3)
