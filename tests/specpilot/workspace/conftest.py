"""A run-owned repository of a small engine tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specpilot.workspace import Workspace
from tests.specpilot.test_engine_tree import TOML


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "src").mkdir(parents=True)
    (folder / "engine.toml").write_text(TOML)
    (folder / "tunables.toml").write_text("rows = 4\n")
    (folder / "src/a.py").write_text("".join(f"line {i}\n" for i in range(30)))
    (folder / "src/dos.txt").write_bytes(b"one\r\ntwo\r\n")
    (folder / "src/__pycache__").mkdir()
    (folder / "src/__pycache__/a.pyc").write_bytes(b"x")
    (folder / ".gitignore").write_text("ignored.bin\n")
    (folder / "ignored.bin").write_bytes(b"the tree has it, so the run has it")
    return folder


@pytest.fixture
def run(tmp_path: Path, tree: Path) -> Workspace:
    return Workspace.create(tmp_path / "run", tree)


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout
