"""Docs against the files: who imports whom (docs/architecture.md), and which tests hold a promise (docs/failure-modes.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("specpilot", "agents", "costmodel", "memory", "engines", "kernels")


def rooms() -> dict[str, str]:
    """Path of each room and the third column of its row."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return dict(
        re.findall(r"^\| `((?:specpilot/|agents/|costmodel/|memory/)\S*)` \| .* \| ([^|]+) \|$", text, re.MULTILINE)
    )


def sources(room: str) -> list[Path]:
    """Python files of a room; `files/` folders are what is copied elsewhere, never imported."""
    path = ROOT / room
    return [path] if path.is_file() else [file for file in path.rglob("*.py") if "files" not in file.parts]


def imported(file: Path) -> Iterator[str]:
    """Dotted names of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]


def room_of(name: str) -> str | None:
    """`specpilot.gate.verdict.judge` is of `gate`; `specpilot.__version__` and what is not ours of no room."""
    first, *rest = name.split(".")
    if first != "specpilot":
        return first if first in OURS else None
    known = rest and ((ROOT / "specpilot" / rest[0]).exists() or (ROOT / "specpilot" / f"{rest[0]}.py").exists())
    return rest[0] if known else None


def test_every_room_has_a_row() -> None:
    present = {
        f"specpilot/{path.name}" + ("/" if path.is_dir() else "")
        for path in (ROOT / "specpilot").iterdir()
        if not path.is_symlink() and (path.suffix == ".py" or (path / "__init__.py").is_file())
    }
    wanted = {name for name in rooms() if name.startswith("specpilot/")}
    assert present - wanted <= {f"specpilot/{name}" for name in ("__init__.py", "__main__.py", "sandbox_guard.py")}
    assert wanted <= present


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_what_its_row_says(room: str) -> None:
    column = rooms()[room]
    own = room.removeprefix("specpilot/").rstrip("/").removesuffix(".py")
    found = {name for file in sources(room) for name in map(room_of, imported(file)) if name} - {own}
    if column.startswith("anything"):
        assert not found & set(re.split(r", | and ", column.removeprefix("anything").removeprefix(" but ")))
    else:
        assert found == (set() if column == "nothing" else set(column.split(", ")))


def test_every_promise_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/failure-modes.md").read_text(encoding="utf-8")))
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(named) > 30
    assert named <= {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
