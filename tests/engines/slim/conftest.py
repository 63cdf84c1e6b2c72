"""Tiny checkpoints shared by the engine's tests, and the engine tree on the import path."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[3] / "engines" / "slim"
if str(TREE) not in sys.path:
    sys.path.insert(0, str(TREE))

import torch  # noqa: E402
from slim_engine.counters import COUNTERS  # noqa: E402

from tests.engines.slim.support import PROMPT, engine, free_port, run, start, wait_until_up  # noqa: E402
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


@pytest.fixture(scope="package")
def server(llama: Path, drafter: Path) -> Iterator[str]:
    """Address of a server that both files of server tests ask."""
    port = free_port()
    process = start(
        *("--target", str(llama), "--drafter", str(drafter), "--port", str(port), "--max-len", "256"),
        *("--variant", "stock", "--name", "tiny"),
        SPECPILOT_COMMIT="abc123",
    )
    yield wait_until_up(process, port)
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in process.communicate(timeout=20)[1]
    assert process.returncode == 0


@pytest.fixture(scope="package")
def truth(llama: Path) -> list[int]:
    """The greedy answer to PROMPT, by the engine in this process."""
    return run(engine(llama), [PROMPT], max_new_tokens=60, ignore_eos=True)[0].output_ids
