"""The client of the engine protocol: asks for tokens, times and counts them itself.

Nothing the engine says about time or token numbers is used for a score. Every request has one deadline that
covers the whole answer, so that an engine that trickles bytes cannot hold the evaluator. Proxies and other
environment settings are ignored: the engine is on this machine.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx

from specpilot.contracts import Generation, Record
from specpilot.evaluation.errors import EngineCrash, EngineError, EngineProtocol, EngineTimeout
from specpilot.evaluation.wire import (
    SseReader,
    count,
    finish_reason,
    flat_counters,
    meta_info,
    parse_object,
    positions_of,
    token_ids,
)

MAX_ANSWER_BYTES = 64 << 20
"""No answer of the protocol is near this size; more is an attempt to fill our memory."""


MAX_INFO_BYTES = 1 << 20
"""The same for what an engine says of itself, which is asked around every leg and kept."""


class Position(Record):
    """The reference's view of one forced token. Log-probabilities are natural logarithms."""

    index: int
    """Index in the forced sequence (prompt included)."""
    token: int
    token_logprob: float
    top_token: int
    top_logprob: float
    gap: float
    """`top_logprob - token_logprob`, at least 0; 0 where the token is the argmax."""
    top: list[tuple[int, float]]
    """The best tokens with their log-probabilities, best first."""


class EngineClient:
    """One engine process, reached over loopback HTTP. Safe to share between threads."""

    def __init__(
        self,
        base_url: str,
        request_timeout_s: float = 120.0,
        on_failure: Callable[[EngineError], EngineError] | None = None,
    ) -> None:
        """`on_failure` may replace an error by a better informed one (the server knows the process and its log)."""
        self.base_url = base_url
        self.request_timeout_s = request_timeout_s
        self._on_failure = on_failure
        self.called_from: set[int] = set()
        """Every local port that a request of ours was sent from."""
        self._http = httpx.Client(
            base_url=base_url,
            trust_env=False,
            timeout=httpx.Timeout(request_timeout_s, connect=min(10.0, request_timeout_s)),
            # A connection per request: a server that was frozen past its keep-alive time resets the old ones when it wakes.
            headers={"Connection": "close"},
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=0),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def generate(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        seed: int | None = None,
        prompt_id: str = "",
        timeout_s: float | None = None,
    ) -> Generation:
        """Streams one answer; times are `time.perf_counter` seconds, tokens are counted from the ids received.

        Raises EngineCrash, EngineTimeout or EngineProtocol; never returns half an answer.
        """
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": ignore_eos,
        }
        if seed is not None:
            sampling["sampling_seed"] = seed
        body = {"input_ids": prompt_ids, "sampling_params": sampling, "stream": True}
        reader = SseReader(limit_bytes=MAX_ANSWER_BYTES)
        output: list[int] = []
        first_s, first_count, meta = 0.0, 0, dict[str, Any]()
        submitted = time.perf_counter()
        with self._streamed("/generate", body, timeout_s) as chunks:
            for chunk in chunks:
                arrived = time.perf_counter()
                for event in reader.feed(chunk):
                    ids = token_ids(event.get("output_ids", []))
                    if len(output) + len(ids) > max_new_tokens:
                        raise EngineProtocol(
                            f"engine sent more than the {max_new_tokens} tokens asked for", "fix the engine's stop rule"
                        )
                    if ids and not output:
                        first_s, first_count = arrived, len(ids)
                    output.extend(ids)
                    meta = meta_info(event) or meta
                if reader.done:
                    break
            last = time.perf_counter()
        if not reader.done:
            self._fail(EngineCrash(f"the stream ended without [DONE] after {len(output)} tokens", self._hint()))
        return Generation(
            prompt_id=prompt_id,
            prompt_ids=prompt_ids,
            output_ids=output,
            submitted_s=submitted,
            first_s=first_s if output else last,
            last_s=last,
            first_chunk_tokens=first_count,
            claimed_tokens=-1 if (claimed := count(meta, "completion_tokens")) is None else claimed,
            finish_reason=finish_reason(meta),
            rounds=count(meta, "spec_verify_ct"),
        )

    def score(self, ids: list[int], start: int, top: int = 2, timeout_s: float | None = None) -> list[Position]:
        """Teacher forcing: how this engine would have continued `ids[:i]`, for each i from `start` to the end.

        `start` must be at least 1 (the first token of a sequence has no prediction). One Position per i, in order.
        """
        if not 1 <= start < len(ids):
            raise ValueError(f"start must be in 1..{len(ids) - 1}, got {start}")
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": max(2, top),
        }
        answer = self._json("POST", "/generate", body, timeout_s)
        rows = positions_of(answer, ids, start)
        return [
            Position(
                index=row.index,
                token=row.token,
                token_logprob=row.logprob,
                top_token=row.top[0][0],
                top_logprob=row.top[0][1],
                gap=0.0 if row.top[0][0] == row.token else max(0.0, row.top[0][1] - row.logprob),
                top=row.top,
            )
            for row in rows
        ]

    def server_info(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """What the engine says of itself: commit, variant, digests, counters."""
        return self._json("GET", "/server_info", None, timeout_s, MAX_INFO_BYTES)

    def counters(self) -> dict[str, float]:
        """The engine's counters, flat and numeric."""
        return flat_counters(self.server_info())

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Empties prefix caches."""
        self._bytes("POST", "/flush_cache", None, timeout_s)

    def healthy(self, timeout_s: float = 2.0, path: str = "/health") -> bool:
        """True when the readiness path answers 200 in time. Never raises."""
        try:
            with _Cutter(timeout_s, self.called_from) as cutter:
                return self._http.get(path, timeout=timeout_s, extensions=cutter.extensions).status_code == 200
        except httpx.HTTPError:
            return False

    def start_profile(self, output_dir: Path, timeout_s: float = 30.0) -> None:
        """Begins a trace that will be written under `output_dir`."""
        self._bytes("POST", "/start_profile", {"output_dir": str(output_dir)}, timeout_s)

    def stop_profile(self, timeout_s: float = 120.0) -> Path:
        """Ends the trace and returns the file's path."""
        answer = self._json("POST", "/stop_profile", None, timeout_s)
        if not isinstance(answer.get("trace"), str):
            raise EngineProtocol(f"/stop_profile gave no trace: {str(answer)[:200]}", "see the engine's log")
        return Path(answer["trace"])

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> Iterator[tuple[httpx.Response, float, float]]:
        """An open response, its time limit in seconds and when that is over; transport errors become ours."""
        limit = self.request_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        cutter = _Cutter(limit, self.called_from)
        try:
            with (
                cutter,
                self._http.stream(method, path, json=body, timeout=limit, extensions=cutter.extensions) as response,
            ):
                yield response, limit, deadline
        except EngineError as error:
            self._fail(error)
        except httpx.HTTPError as error:
            if cutter.cut or isinstance(error, httpx.TimeoutException):
                self._fail(EngineTimeout(f"{path}: no answer within {limit:.0f} s", self._hint()))
            self._fail(EngineCrash(f"{path}: connection lost ({type(error).__name__}: {error})", self._hint()))

    @contextmanager
    def _streamed(self, path: str, body: Any, timeout_s: float | None) -> Iterator[Iterator[bytes]]:
        """The chunks of an answer, until the deadline."""
        with self._exchange("POST", path, body, timeout_s) as (response, limit, deadline):
            if response.status_code != 200:
                self._refused(path, response.status_code, _head(response, deadline))
            yield _until(response.iter_raw(), deadline, f"{path} after {limit:.0f} s")

    def _bytes(
        self, method: str, path: str, body: Any, timeout_s: float | None, limit: int = MAX_ANSWER_BYTES
    ) -> bytes:
        with self._exchange(method, path, body, timeout_s) as (response, _, deadline):
            content = _head(response, deadline, limit)
            if len(content) > limit:
                raise EngineProtocol(f"{path}: answer larger than {limit} bytes", "the engine misbehaves; see its log")
            if response.status_code != 200:
                self._refused(path, response.status_code, content)
            return content

    def _json(
        self, method: str, path: str, body: Any, timeout_s: float | None, limit: int = MAX_ANSWER_BYTES
    ) -> dict[str, Any]:
        return parse_object(self._bytes(method, path, body, timeout_s, limit), f"{path}: answer")

    def _refused(self, path: str, status: int, content: bytes) -> NoReturn:
        words = f"{path}: HTTP {status}: {content[:500].decode(errors='replace')}"
        raise (EngineCrash if status >= 500 else EngineProtocol)(words, self._hint())

    def _fail(self, error: EngineError) -> NoReturn:
        raise self._on_failure(error) if self._on_failure is not None else error

    def _hint(self) -> str:
        return f"engine at {self.base_url}: see its log"


class _Cutter:
    """Shuts a request's connection down when its time is over, wherever it waits.

    The HTTP library's own limits hold for one read each: an engine that sends its headers line by line would never pass one.
    """

    def __init__(self, limit_s: float, called_from: set[int]) -> None:
        """`called_from` learns the local port of the connection."""
        self.cut = False
        self._called_from = called_from
        self.extensions = {"trace": self._seen}
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(limit_s + 0.5, self._shut)
        self._timer.daemon = True

    def __enter__(self) -> _Cutter:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _seen(self, name: str, info: dict[str, Any]) -> None:
        if name == "connection.connect_tcp.complete":
            connection = info["return_value"].get_extra_info("socket")
            self._called_from.add(connection.getsockname()[1])
            self._sockets.append(connection)
            if self.cut:
                self._shut()

    def _shut(self) -> None:
        self.cut = True
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _until(chunks: Iterator[bytes], deadline: float, what: str) -> Iterator[bytes]:
    for chunk in chunks:
        if time.monotonic() > deadline:
            raise EngineTimeout(f"{what}: answer not complete", "the engine is too slow or hangs; see its log")
        yield chunk


def _head(response: httpx.Response, deadline: float, limit: int = 4096) -> bytes:
    """The body, cut off soon after `limit` bytes."""
    content = bytearray()
    for chunk in _until(response.iter_raw(), deadline, "answer"):
        content += chunk
        if len(content) > limit:
            break
    return bytes(content)
