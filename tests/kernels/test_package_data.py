"""Files that are read or compiled at run time must be in the wheel, and no pattern may stand for files that are no more."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_source_of_a_kernel_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["specpilot.kernels"]
    packaged = {path for pattern in patterns for path in (ROOT / "kernels").glob(pattern)}
    sources = {
        p for p in (ROOT / "kernels").rglob("*") if p.suffix in {".cpp", ".hpp", ".h", ".cu", ".cuh", ".json", ".toml"}
    }
    assert ROOT / "kernels/w12/cpu/panels.hpp" in sources
    assert sources <= packaged, sorted(map(str, sources - packaged))


def test_every_pattern_stands_for_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    stale = [
        (package, pattern)
        for package, patterns in data.items()
        for pattern in patterns
        if not any(path.is_file() for path in ROOT.joinpath(*package.split(".")).resolve().glob(pattern))
    ]
    assert stale == []


def test_every_data_file_is_packaged() -> None:
    """Whatever git keeps in the packages besides Python: READMEs of folders that nobody reads at run time excepted."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {
        path.resolve()
        for package, patterns in data.items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).resolve().glob(pattern)
    }
    tops = ("specpilot", "agents", "costmodel", "memory", "engines", "kernels", "deployments")
    found = {
        p.resolve() for top in tops for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    left = {p for p in found if p.suffix not in {".py", ".md", ".pyc", ".so"}} - packaged
    assert left == set()
