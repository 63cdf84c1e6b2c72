"""A fresh store per test, and builders of valid records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from specpilot.memory import Effect, Hardware, Mechanism, MemoryStore, RecallQuery

PATCH = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
AVX2 = Hardware(kind="cpu", isa=["avx2", "fma"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'memory.db'}"


@pytest.fixture
def store(url: str) -> Iterator[MemoryStore]:
    with MemoryStore(url, seed_folder=None) as opened:
        yield opened


@pytest.fixture
def mechanism() -> Callable[..., Mechanism]:
    def build(name: str = "bf16_gemm", **fields: Any) -> Mechanism:
        base: dict[str, Any] = {
            "component": "target.mlp",
            "title": "Skinny GEMM on BF16 weights",
            "hypothesis": "Half the bytes per weight halve the time.",
            "patch": PATCH,
        }
        return Mechanism(name=name, **{**base, **fields})

    return build


@pytest.fixture
def effect() -> Callable[..., Effect]:
    def build(ratio: float = 1.5, **fields: Any) -> Effect:
        base: dict[str, Any] = {
            "deployment": "cpu_c1",
            "deployment_fingerprint": "f1",
            "hardware": AVX2,
            "ratio": ratio,
            "low": ratio - 0.1,
            "high": ratio + 0.1,
            "samples": [ratio, ratio],
            "run": "run-1",
            "outcome": "verified",
            "at": datetime(2026, 11, 1, tzinfo=UTC),
        }
        return Effect(**{**base, **fields})

    return build


@pytest.fixture
def query() -> Callable[..., RecallQuery]:
    def build(**fields: Any) -> RecallQuery:
        base: dict[str, Any] = {
            "hardware": AVX2,
            "architecture": "llama",
            "drafter": "dflash",
            "engine": "slim",
            "concurrency": 1,
        }
        return RecallQuery(**{**base, **fields})

    return build
