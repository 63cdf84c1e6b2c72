"""A server whose engine fails in the midst of requests: all who wait are told, whatever they wait for, and /health knows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.engines.slim.conftest import TREE
from tests.engines.slim.support import PROMPT, free_port, generate, greedy, wait_until_up

FAILING = """
import builtins, sys
from slim_engine import scheduler
from slim_engine.server import main
name, error, at = sys.argv[1], getattr(builtins, sys.argv[2]), int(sys.argv[3])
real, calls = getattr(scheduler, name), 0
def failing(*arguments):
    global calls
    calls += 1
    if calls == at:
        raise error("planted")
    return real(*arguments)
setattr(scheduler, name, failing)
if len(sys.argv[4:]) and sys.argv[4] == "mute":
    def mute():
        raise MemoryError
    scheduler.traceback.print_exc = mute
sys.exit(main(sys.argv[5:]))
"""
"""A server in which the `at`-th call of one function of the engine's loop raises. mute: nor can the error be printed."""


@contextmanager
def _server(
    target: Path, function: str, error: str, at: int, how: str = "told"
) -> Iterator[tuple[str, subprocess.Popen]]:
    port = free_port()
    options = [
        "--target",
        str(target),
        "--port",
        str(port),
        "--threads",
        "1",
        "--max-len",
        "512",
        "--max-requests",
        "2",
    ]
    command = [sys.executable, "-c", FAILING, function, error, str(at), how, *options]
    env = {**os.environ, "PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=TREE, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield wait_until_up(process, port), process
    finally:
        process.kill()
        process.communicate(timeout=20)


def _streamed(url: str) -> str:
    """The error that ends a stream of each API."""
    body = {"input_ids": PROMPT, "sampling_params": greedy(400), "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as answer:
        last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")][-1]
    finish = last["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"
    return str(finish["message"])


def _streamed_by_openai(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")][-1]
    return str(last["error"]["message"])


def _whole(url: str) -> str:
    answer = generate(url, input_ids=PROMPT, sampling_params=greedy(400))
    assert answer.status_code in (500, 503) and answer.json()["error"]["type"] == "server_error"
    return str(answer.json()["error"]["message"])


def _all_wait(url: str) -> list[str]:
    """Six requests at once of a server that runs two: some run, one is in its prompt, some wait."""
    asks = [_streamed, _whole, _streamed_by_openai] * 2
    with ThreadPoolExecutor(len(asks)) as pool:
        return [job.result(60) for job in [pool.submit(ask, url) for ask in asks]]


@pytest.mark.parametrize(("function", "at"), [("decode_round", 40), ("first_token", 2)])
def test_memory_that_runs_out_in_a_step_ends_those_it_hit_and_no_more(llama: Path, function: str, at: int) -> None:
    with _server(llama, function, "MemoryError", at) as (url, process):
        told: list[str] = []
        with ThreadPoolExecutor(2) as pool:
            for job in [pool.submit(generate, url, input_ids=PROMPT, sampling_params=greedy(300)) for _ in range(2)]:
                answer = job.result(60)
                if answer.status_code != 200:
                    told.append(answer.json()["error"]["message"])
        assert told and set(told) == {"MemoryError: planted"}
        assert httpx.get(f"{url}/health").status_code == 200
        assert len(generate(url, input_ids=PROMPT, sampling_params=greedy(5)).json()["output_ids"]) == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("function", "error", "at", "how"),
    [
        ("decode_round", "SystemExit", 40, "told"),
        ("first_token", "KeyboardInterrupt", 2, "told"),  # the request is in no list at that moment
        ("Segment", "SystemExit", 1, "told"),
        ("decode_round", "MemoryError", 40, "mute"),
    ],
)
def test_when_the_engine_thread_dies_nobody_waits(llama: Path, function: str, error: str, at: int, how: str) -> None:
    with _server(llama, function, error, at, how) as (url, process):
        told = _all_wait(url)
        assert len(told) == 6 and all("engine thread ended" in message for message in told), told
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and "ended" in health.json()["status"]
        late = generate(url, input_ids=PROMPT, sampling_params=greedy(3))
        assert late.status_code == 503 and "engine thread ended" in late.json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1
