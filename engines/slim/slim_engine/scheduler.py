"""Continuous batching: requests join and leave between rounds. One thread runs everything that touches a tensor."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from slim_engine import profiling
from slim_engine.counters import COUNTERS
from slim_engine.loading import Loaded
from slim_engine.request import Chunk, Request
from slim_engine.round import decode_round, first_token, token_logprobs
from slim_engine.target import Segment

T = TypeVar("T")
_GOING_DOWN = "the server is shutting down"
_SCORE_ROWS = 64  # rows of logits held at once while scoring


class Scheduler:
    """Waiting, prefilling and running requests. `step` does one prefill chunk and one decode round. Not thread-safe: see EngineThread."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.models = loaded.models
        self._max_running = loaded.options.max_requests
        self._prefill_chunk: int = loaded.tunables["prefill_chunk"]
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, request: Request) -> None:
        """Queues a request, first come, first served."""
        self._waiting.append(request)

    def step(self) -> None:
        """One prefill chunk, if a prompt is pending, and one decode round of all running requests. An error ends the requests it hit."""
        self._drop_cancelled()
        while self._waiting and len(self._prefilling) + len(self._running) < self._max_running:
            self._guard([self._waiting.popleft()], self._admit)
        if self._prefilling:
            self._guard([self._prefilling[0]], self._prefill)
        if self._running:
            self._guard(list(self._running), self._decode)

    def abort_all(self, message: str) -> None:
        """Ends every request, also where ending one of them fails."""
        for request in [*self._waiting, *self._prefilling, *self._running]:
            try:
                self._fail(request, message)
            except Exception:
                traceback.print_exc()
        self._waiting.clear()

    def _admit(self, requests: list[Request]) -> None:
        request = requests[0]
        request.cache = self.models.target.pool.take()
        if self._drafter_for(request) is not None:
            self._drafter_for(request).start(request)
        self._prefilling.append(request)

    def _drafter_for(self, request: Request) -> Any:
        """None for pure scoring, which needs no drafts."""
        return self.models.drafter if request.params.max_new_tokens > 0 else None

    def _guard(self, requests: list[Request], work: Callable[[list[Request]], None]) -> None:
        try:
            work(requests)
        except Exception as error:
            traceback.print_exc()
            for request in requests:
                self._fail(request, f"{type(error).__name__}: {error}")

    def _prefill(self, requests: list[Request]) -> None:
        request = requests[0]
        started = time.perf_counter_ns()
        tokens = request.prompt_ids[request.prefilled : request.prefilled + self._prefill_chunk]
        drafter = self._drafter_for(request)
        assert request.cache is not None
        hidden, taps = self.models.target.forward([Segment(tokens, request.cache)], drafter.tap_ids if drafter else ())
        if request.logprobs is not None and request.logprobs.start is not None:
            self._score(request, hidden)
        request.cache.length += len(tokens)
        request.prefilled += len(tokens)
        if drafter is not None:
            drafter.observe(request, taps)
            drafter.absorb([request])
        COUNTERS.add("prefill_tokens", len(tokens))
        COUNTERS.add("prefill_forwards")
        profiling.event("prefill", started, rows=len(tokens), context_len=request.cache.length)
        if request.prefilled == len(request.prompt_ids):
            self._prefilling.remove(request)
            self._first(request, hidden)

    def _first(self, request: Request, hidden: torch.Tensor) -> None:
        if request.params.max_new_tokens == 0:
            request.finish = {"type": "length", "length": 0}
            chunk = Chunk([], [], request.finish)
        else:
            chunk = first_token(request, hidden[-1:], self.models.head)
        if request.finish is None:
            self._running.append(request)
        else:
            self._release(request)
        request.emit(chunk)

    def _score(self, request: Request, hidden: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens from hidden rows [n, H] of the chunk that starts at request.prefilled."""
        assert request.logprobs is not None and request.logprobs.start is not None
        begin, end = request.prefilled, request.prefilled + len(hidden)
        first = max(request.logprobs.start, begin)  # row p scores token p + 1
        last = min(end, len(request.prompt_ids) - 1)
        for a in range(first, last, _SCORE_ROWS):
            b = min(a + _SCORE_ROWS, last)
            logits = self.models.head.logits(hidden[a - begin : b - begin])
            request.input_logprobs += token_logprobs(logits, 0, request.prompt_ids[a + 1 : b + 1], request.logprobs.top)

    def _decode(self, requests: list[Request]) -> None:
        chunks = decode_round(requests, self.models)
        for request in requests:
            if request.finish is not None:
                self._release(request)
        for request, chunk in zip(requests, chunks, strict=True):
            request.emit(chunk)

    def _release(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        if request.cache is not None:
            self.models.target.pool.give(request.cache)
            request.cache = None
            if self._drafter_for(request) is not None:
                self._drafter_for(request).finish(request)
        COUNTERS.add("requests")

    def _fail(self, request: Request, message: str) -> None:
        request.finish = {"type": "abort", "message": message}
        try:
            self._release(request)
        finally:
            request.emit(Chunk([], [], request.finish))

    def _drop_cancelled(self) -> None:
        for request in [r for r in [*self._waiting, *self._prefilling, *self._running] if r.cancelled]:
            if request in self._waiting:
                self._waiting.remove(request)
            self._fail(request, "cancelled by the client")


class EngineThread:
    """Runs a Scheduler in a thread of its own, which also loads the models, so that torch's worker threads belong to it alone."""

    def __init__(self, make: Callable[[], Scheduler], threads: int | None) -> None:
        self._make = make
        self._threads = threads
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self.farewell = _GOING_DOWN  # what requests hear that come, or still run, when the thread ends
        self.broken = False  # it ended because of an error
        self.threads = 0  # of torch in this thread, once the models are loaded
        self.ready: Future[Scheduler] = Future()
        self._thread = threading.Thread(target=self._run, name="slim-engine", daemon=True)

    def start(self) -> Scheduler:
        """Starts the thread and waits for the models. Raises what loading raised."""
        self._thread.start()
        return self.ready.result()

    def halt(self) -> None:
        """Asks the thread to end running requests, and itself, after the present step. Does not wait."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self) -> None:
        """`halt`, and waits for the end."""
        self.halt()
        self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Hands a request over; its chunks arrive through request.emit, called in the engine thread."""
        if not self._post(lambda: self.ready.result().add(request)):
            request.finish = {"type": "abort", "message": self.farewell}
            request.emit(Chunk([], [], request.finish))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` in the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if not self._post(run):
            future.set_exception(ValueError(self.farewell))
        return future

    def _post(self, item: Callable[[], None]) -> bool:
        """False if the thread takes nothing more."""
        with self._wake:
            if not self._stopping:
                self._inbox.append(item)
                self._wake.notify()
            return not self._stopping

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                if self._threads:
                    torch.set_num_threads(self._threads)
                scheduler = self._make()
            except BaseException as error:
                self.ready.set_exception(error)
                return
            self.threads = torch.get_num_threads()
            gc.freeze()  # the models live as long as the process: no collection need look at them
            self.ready.set_result(scheduler)
            try:
                self._work(scheduler)
            except BaseException as error:  # nobody above would tell the clients that wait
                self.broken, self.farewell = True, f"the engine thread ended: {type(error).__name__}: {error}"
                traceback.print_exc()
            finally:
                self.halt()  # from here on nothing is taken, so that nothing is left waiting
                self._empty_inbox()
                scheduler.abort_all(self.farewell)

    def _work(self, scheduler: Scheduler) -> None:
        while not self._stopping:
            with self._wake:
                while not self._inbox and not scheduler.busy and not self._stopping:
                    self._wake.wait()
            self._empty_inbox()
            if scheduler.busy:
                scheduler.step()

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
