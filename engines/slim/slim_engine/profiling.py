"""Scope marks of the round, written as a Chrome trace.

The engine runs one operation after another in one thread, so a scope ends where the next begins: `mark(name)` closes the open scope and
opens `name`; `mark(None)` closes only. When no trace is being taken a mark is one comparison.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

_MAX_EVENTS = 2_000_000


class Trace:
    """Events of one profile. Times in microseconds since the start of the trace."""

    def __init__(self) -> None:
        self._origin = time.perf_counter_ns()
        self._events: list[dict[str, Any]] = []
        self._open: str | None = None
        self._since = 0
        self._pid = os.getpid()

    def mark(self, name: str | None) -> None:
        now = time.perf_counter_ns()
        if self._open is not None:
            self.event(self._open, self._since, now, {})
        self._open, self._since = name, now

    def event(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": (start_ns - self._origin) / 1e3,
                    "dur": (end_ns - start_ns) / 1e3,
                    "pid": self._pid,
                    "tid": threading.get_ident() % 2**31,
                    "args": args,
                }
            )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))


_trace: Trace | None = None


def mark(name: str | None) -> None:
    """Scope `name` begins (names: engine.toml `[scopes]`); None: back to host time."""
    if _trace is not None:
        _trace.mark(name)


def event(name: str, start_ns: int, **args: Any) -> None:
    """A whole event ("round", "prefill") from `start_ns` (time.perf_counter_ns) until now."""
    if _trace is not None:
        _trace.event(name, start_ns, time.perf_counter_ns(), args)


def start() -> None:
    """Begins a trace. Call in the engine thread. ValueError if one is open."""
    global _trace
    if _trace is not None:
        raise ValueError("a profile is already being taken: POST /stop_profile first")
    _trace = Trace()


def stop(path: Path) -> Path:
    """Ends the trace and writes it. ValueError if none is open."""
    global _trace
    if _trace is None:
        raise ValueError("no profile is being taken: POST /start_profile first")
    trace, _trace = _trace, None
    trace.mark(None)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.write(path)
    return path
