"""Sources that are compiled at run time must be in the wheel."""

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
