"""A small engine tree in a real git repository, and a context to work in."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot.agents import WorkContext
from specpilot.memory import Hardware

ENGINE_TOML = """
[tunables.verify_drafts]
type = "int"
min = 1
max = 15
default = 15
max_from = "block_size - 1"
component = "policy"

[tunables.lazy]
type = "bool"
default = false
component = "draft"

[tunables.pack]
type = "choice"
choices = [1, 8, 32]
default = 8
component = "linear"

[tunables.ngram_max]
type = "int"
min = 2
max = 8
default = 4
component = "ngram"
"""
TUNABLES_TOML = "# knobs\nverify_drafts = 15  # all\nlazy = false\npack = 8\nngram_max = 4\n"
MODULE = "".join(f"line_{number} = {number}\n" for number in range(40))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "engine tree"
    folder.mkdir()
    (folder / "engine.toml").write_text(ENGINE_TOML)
    (folder / "tunables.toml").write_text(TUNABLES_TOML)
    (folder / "module.py").write_text(MODULE)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def patch(tree: Path) -> Callable[[dict[str, str]], str]:
    """Diff that replaces text in module.py; the tree is left as it was."""

    def make(changes: dict[str, str]) -> str:
        path = tree / "module.py"
        before = path.read_text()
        text = before
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        diff = git(tree, "diff")
        path.write_text(before)
        return diff

    return make


@pytest.fixture
def context(tree: Path, tmp_path: Path) -> Callable[..., WorkContext]:
    def build(**fields: Any) -> WorkContext:
        base: dict[str, Any] = {
            "run_id": "run-1",
            "round": 1,
            "folder": tmp_path / "work",
            "tree": tree,
            "base_commit": "a" * 40,
            "hardware": Hardware(kind="cpu", isa=["avx2", "fma"]),
            "architecture": "llama",
            "drafter": "dflash",
            "engine": "slim",
            "block_size": 8,
        }
        return WorkContext(**{**base, **fields})

    return build
