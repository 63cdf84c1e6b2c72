"""Tiny checkpoints shared by the engine's tests, and the engine tree on the import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[3] / "engines" / "slim"
if str(TREE) not in sys.path:
    sys.path.insert(0, str(TREE))

import torch  # noqa: E402
from slim_engine.counters import COUNTERS  # noqa: E402

from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """One thread (the models are tiny) and counters at zero."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    COUNTERS.reset()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=False, heads=6, kv_heads=2)


@pytest.fixture(scope="session")
def drafter(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), llama)
