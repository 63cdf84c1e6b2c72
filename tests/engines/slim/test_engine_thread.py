"""The engine thread when something goes wrong in it: whoever waits is told, and the server knows."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from slim_engine.kv import KVPool
from slim_engine.loading import Loaded
from slim_engine.request import Chunk, Request
from slim_engine.sampling import SamplingParams
from slim_engine.scheduler import EngineThread, Scheduler

from tests.engines.slim.support import engine


def _thread(loaded: Loaded, threads: int | None = 1) -> EngineThread:
    return EngineThread(lambda: Scheduler(loaded), threads)


def _request(name: str, emit: Callable[[Chunk], None], tokens: int = 4) -> Request:
    return Request(name, [5, 9, 7], SamplingParams(max_new_tokens=tokens, ignore_eos=True), (2,), emit)


def _last(chunks: queue.Queue[Chunk]) -> dict:
    """The finish of the chunk that ends a request; fails where none comes."""
    while True:
        finish = chunks.get(timeout=30).finish
        if finish is not None:
            return finish


def test_a_request_without_memory_for_its_cache_ends_alone(llama: Path) -> None:
    loaded = engine(llama)
    target = loaded.models.target
    good, target.pool = target.pool, KVPool(1, 1, 1, 2**60)  # more than any machine has
    thread = _thread(loaded)
    thread.start()
    try:
        chunks: queue.Queue[Chunk] = queue.Queue()
        thread.submit(_request("first", chunks.put))
        told = _last(chunks)
        assert told["type"] == "abort" and "RuntimeError" in told["message"]
        assert thread.alive
        target.pool = good
        thread.submit(_request("second", chunks.put))
        assert _last(chunks) == {"type": "length", "length": 4}
    finally:
        thread.stop()


def test_when_the_thread_breaks_those_who_wait_are_told(llama: Path) -> None:
    def broken(_: Chunk) -> None:
        raise LookupError("nobody here")

    thread = _thread(engine(llama))
    scheduler = thread.start()
    chunks: queue.Queue[Chunk] = queue.Queue()
    gone = _request("gone", broken)
    gone.cancelled = True

    def add_both() -> None:
        scheduler.add(gone)
        scheduler.add(_request("waits", chunks.put, 200))

    thread.call(add_both).result(30)
    told = _last(chunks)
    assert told["type"] == "abort" and "LookupError: nobody here" in told["message"]
    thread.stop()
    assert not thread.alive, "what /health reads"
    thread.submit(_request("late", chunks.put))
    assert "LookupError: nobody here" in _last(chunks)["message"]
    with pytest.raises(ValueError, match="LookupError"):
        thread.call(lambda: None).result(0)


@pytest.mark.parametrize("threads", [-1, 0.5])
def test_threads_that_torch_refuses_end_the_start(llama: Path, threads: int) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        _thread(engine(llama), threads).start()


def test_it_says_how_many_threads_it_computes_on(llama: Path) -> None:
    assert torch.get_num_threads() == 1
    thread = _thread(engine(llama), 2)
    thread.start()
    thread.stop()
    assert thread.threads == 2
