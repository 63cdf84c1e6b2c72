"""Runs requests through the real scheduler, in this thread; and what tests that ask a server have in common."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import slim_engine
import torch
from slim_engine.drafting import Proposal
from slim_engine.loading import EngineOptions, Loaded, load
from slim_engine.request import Chunk, LogprobOptions, Request
from slim_engine.sampling import SamplingParams
from slim_engine.scheduler import Scheduler
from slim_engine.text import Detokenizer, TextCodec
from slim_engine.tunables import load_tunables

PROMPT = [7, 9, 11, 200, 31]
TREE = Path(slim_engine.__file__).resolve().parents[1]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def greedy(tokens: int = 20, **more: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy answer of fixed length."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A server of the engine tree as a process of its own, on one thread."""
    env = {**os.environ, "PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "slim_engine.server", "--threads", "1", *arguments]
    return subprocess.Popen(command, cwd=TREE, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_up(process: subprocess.Popen[str], port: int) -> str:
    """The address of a server once it answers. Fails with what it said if it ends before."""
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.poll() is None, process.communicate()
        try:
            httpx.get(f"{url}/health").raise_for_status()
            break
        except httpx.TransportError:
            time.sleep(0.1)
    return url


def generate(url: str, **body: Any) -> httpx.Response:
    """The answer of the native API."""
    return httpx.post(f"{url}/generate", json=body, timeout=60)


def engine(
    target: Path, drafter: Path | str = "none", compute: Any = "float32", max_requests: int = 8, **tunables: Any
) -> Loaded:
    """A loaded engine with some tunables changed."""
    values = load_tunables()
    values.update(tunables)
    return load(EngineOptions(target, str(drafter), compute, max_requests=max_requests), values)


def run(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    logprobs: LogprobOptions | None = None,
    chunks: list[Chunk] | None = None,
    seeds: Sequence[int] | None = None,
    **params: Any,
) -> list[Request]:
    """Decodes all prompts together and returns the finished requests."""
    requests = []
    sink = (lambda c: None) if chunks is None else chunks.append
    with torch.inference_mode():
        scheduler = Scheduler(loaded)
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(**params, **({} if seeds is None else {"seed": seeds[i]}))
            detokenizer = Detokenizer(TextCodec(loaded.options.target)) if sampling.stop else None
            requests.append(
                Request(str(i), list(prompt), sampling, loaded.config.eos_token_ids, sink, logprobs, detokenizer)
            )
            scheduler.add(requests[-1])
        while scheduler.busy:
            scheduler.step()
    return requests


class PlannedDrafter:
    """Knows each request's true continuation and spoils chosen slots: round r of a request has its first `plan[r]` drafts right."""

    method = "planned"
    tap_ids: tuple[int, ...] = ()

    def __init__(
        self, truth: dict[tuple[int, ...], list[int]], plan: Sequence[int], max_drafts: int, vocab: int
    ) -> None:
        self.truth, self.plan, self.max_drafts, self.vocab = truth, list(plan), max_drafts, vocab

    def start(self, request: Request) -> None:
        request.draft_state = 0

    def observe(self, request: Request, taps: Any) -> None:
        pass

    def absorb(self, requests: Sequence[Request]) -> None:
        pass

    def finish(self, request: Request) -> None:
        pass

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        out = []
        for request, count in zip(requests, counts, strict=True):
            done = len(request.output_ids)
            future = self.truth[tuple(request.prompt_ids)][done : done + count]
            right = self.plan[request.draft_state % len(self.plan)]
            request.draft_state += 1
            out.append(Proposal([t if i < right else (t + 1) % self.vocab for i, t in enumerate(future)]))
        return out
