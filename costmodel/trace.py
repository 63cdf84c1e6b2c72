"""Attribute a Chrome trace to the components of a decode round.

Reads what `torch.profiler` exports and what an engine's own profiler writes: complete events (`"ph": "X"`, times in
microseconds) named by scope, and one event named `round` per decode round. Only time inside rounds counts, so prefill is
left out. Nested scopes count once: a scope's time is its own, without that of the scopes inside it. What no scope
covers is `host`. On a GPU trace the scopes on the GPU's timeline (`gpu_user_annotation`) are used where they exist.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .errors import CostModelError

ROUND = "round"
_TOLERANCE = 0.10


@dataclass(frozen=True)
class Span:
    """One complete event, in microseconds."""

    name: str
    start: float
    end: float
    track: tuple[Any, Any]
    args: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class Profile:
    """Median milliseconds per decode round, by component; `host` included."""

    component_ms: dict[str, float]
    round_ms: float
    rounds: int
    """Rounds that the medians are over: those of the commonest number of rows, where it varies."""
    rows: float | None
    """Median target rows per round, all requests together, where the rounds say so."""
    requests: float | None
    context_len: float | None
    accepted_length: float | None
    """Committed tokens per round and request (mean), where the rounds say so."""
    draft_rows: float | None = None
    """Median block tokens per request in the draft pass, where the rounds say so."""
    draft_vocab: float | None = None
    """Median rows of the draft head, where the rounds say so (a reduced draft head should)."""
    warnings: tuple[str, ...] = ()
    widths: dict[int, int] = field(default_factory=dict)
    """All rounds of the trace, counted by their number of target rows; empty where rounds do not say."""

    @property
    def varied(self) -> bool:
        """True if the engine chooses its width: more rounds of other widths than answers' last rounds explain."""
        return self.rounds < 0.9 * sum(self.widths.values())


def load_events(path: Path | str) -> list[dict[str, Any]]:
    """Read the events of a trace file (.json, or .json.gz); both the object and the bare list form."""
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        value = json.loads(data)
    except FileNotFoundError as error:
        raise CostModelError(f"no trace at {path}: profile the engine first") from error
    except (OSError, ValueError, EOFError) as error:
        raise CostModelError(f"{path} is not a Chrome trace ({error}): profile again") from error
    events = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(events, list):
        raise CostModelError(f"{path} has no `traceEvents` list: not a Chrome trace")
    return [event for event in events if isinstance(event, dict)]


def spans(events: Iterable[Mapping[str, Any]], names: set[str]) -> list[Span]:
    """Keep the complete events with these names. Prefers GPU annotations when the trace has any round of them."""
    kept = [e for e in events if e.get("ph") == "X" and e.get("name") in names]
    on_gpu = [e for e in kept if e.get("cat") == "gpu_user_annotation"]
    if any(e["name"] == ROUND for e in on_gpu):
        kept = on_gpu
    else:
        kept = [e for e in kept if e.get("cat") != "gpu_user_annotation"]
    found = []
    for event in kept:
        try:
            start, duration = float(event["ts"]), float(event["dur"])
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(f"trace event {event.get('name')!r} has no usable ts and dur") from error
        args = event.get("args")
        track = (event.get("pid"), event.get("tid"))
        found.append(Span(event["name"], start, start + duration, track, args if isinstance(args, dict) else {}))
    return found


def self_times(track: Sequence[Span]) -> list[tuple[Span, float]]:
    """Own time of each span on one track: its duration without the spans nested in it, in microseconds."""
    ordered = sorted(track, key=lambda span: (span.start, -span.end))
    own = [span.end - span.start for span in ordered]
    stack: list[int] = []
    for index, span in enumerate(ordered):
        while stack and ordered[stack[-1]].end <= span.start:
            stack.pop()
        if stack:
            own[stack[-1]] -= min(span.end, ordered[stack[-1]].end) - span.start
        stack.append(index)
    return list(zip(ordered, own, strict=True))


def attribute(
    events: Iterable[Mapping[str, Any]], expected: Sequence[str], *, scopes: Mapping[str, str] | None = None
) -> Profile:
    """Return the median time of each component per round.

    `expected` are the component names that a round should show (a missing one is warned of). `scopes` maps the
    trace's names to component names where they differ (engine.toml `[scopes]`). Raises `CostModelError` when the
    trace has no round.
    """
    rename = {**{name: name for name in expected}, **(scopes or {})}
    found = spans(events, {*rename, ROUND})
    rounds = sorted((s for s in found if s.name == ROUND), key=lambda s: s.start)
    if not rounds:
        raise CostModelError("the trace has no `round` event: profile while requests are being decoded")
    committed, widths = _mean_committed(rounds), Counter(round(rows) for rows in _numbers(rounds, "rows"))
    rounds = _commonest_width(rounds)
    times = _per_round(found, rounds, rename)
    warnings: list[str] = []
    round_ms = median((r.end - r.start) / 1e3 for r in rounds)
    seen = {name for entry in times for name in entry}
    component_ms = {name: median(entry.get(name, 0.0) / 1e3 for entry in times) for name in expected if name != "host"}
    component_ms |= {
        name: median(entry.get(name, 0.0) / 1e3 for entry in times) for name in sorted(seen - set(expected) - {"host"})
    }
    hosts = [(r.end - r.start - sum(entry.values())) / 1e3 for r, entry in zip(rounds, times, strict=True)]
    component_ms["host"] = max(median(hosts), 0.0)
    missing = [name for name in expected if name not in seen and name not in ("host", "sample")]
    if missing:
        warnings.append(f"the trace has no scope {', '.join(missing)}: their time is inside another scope or in host")
    warnings += _check_sum(component_ms, round_ms, median(hosts))
    return Profile(
        component_ms=component_ms,
        round_ms=round_ms,
        rounds=len(rounds),
        rows=_median_arg(rounds, "rows"),
        requests=_median_arg(rounds, "requests"),
        context_len=_median_arg(rounds, "context_len"),
        accepted_length=committed,
        widths=dict(widths),
        draft_rows=_median_arg(rounds, "draft_rows"),
        draft_vocab=_median_arg(rounds, "draft_vocab"),
        warnings=tuple(warnings),
    )


def _commonest_width(rounds: list[Span]) -> list[Span]:
    """Rounds with the commonest number of rows: one bound belongs to one width, and medians over several mean nothing."""
    widths = Counter(r.args.get("rows") for r in rounds)
    width, _ = max(widths.items(), key=lambda item: (item[1], item[0] or 0))
    return [r for r in rounds if r.args.get("rows") == width]


def _per_round(found: Sequence[Span], rounds: Sequence[Span], rename: Mapping[str, str]) -> list[dict[str, float]]:
    """Own microseconds by component for each round; a span belongs to the round that holds its middle."""
    tracks: dict[tuple[Any, Any], list[Span]] = defaultdict(list)
    for span in found:
        if span.name != ROUND:
            tracks[span.track].append(span)
    times: list[dict[str, float]] = [defaultdict(float) for _ in rounds]
    starts = [r.start for r in rounds]
    for track in tracks.values():
        for span, own in self_times(track):
            middle = (span.start + span.end) / 2
            index = bisect.bisect_right(starts, middle) - 1
            if index >= 0 and middle <= rounds[index].end:
                times[index][rename[span.name]] += own
    for entry in times:
        entry.pop("host", None)  # an engine may mark host time itself; the remainder is the one definition
    return [dict(entry) for entry in times]


def _check_sum(component_ms: Mapping[str, float], round_ms: float, host: float) -> list[str]:
    total = sum(component_ms.values())
    warnings = []
    if host < 0:
        warnings.append(
            f"scopes add up to {round_ms - host:.3f} ms in a round of {round_ms:.3f} ms: scopes overlap on several threads"
        )
    elif round_ms > 0 and abs(total - round_ms) > _TOLERANCE * round_ms:
        warnings.append(
            f"median components add up to {total:.3f} ms, the median round takes {round_ms:.3f} ms: rounds differ much"
        )
    return warnings


def _numbers(rounds: Sequence[Span], key: str) -> list[float]:
    return [float(r.args[key]) for r in rounds if isinstance(r.args.get(key), int | float)]


def _median_arg(rounds: Sequence[Span], key: str) -> float | None:
    values = _numbers(rounds, key)
    return median(values) if values else None


def _mean_committed(rounds: Sequence[Span]) -> float | None:
    committed = _numbers(rounds, "committed")
    if not committed:
        return None
    requests = _numbers(rounds, "requests")
    return sum(committed) / (sum(requests) if len(requests) == len(committed) else len(committed))
