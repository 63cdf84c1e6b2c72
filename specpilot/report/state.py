"""What the live view knows about a run: events folded into one small state. No drawing here.

Every field of an event is optional to the reader: an unknown kind or a missing field never stops a run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specpilot.words import count

LAST_EVENTS = 8
TASK_LETTERS = 60
"""An attempt that no mechanism names is called by so much of its task."""
MALFORMED = (TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What reading an event of an unforeseen form can raise."""


@dataclass
class AttemptLine:
    """One attempt as shown."""

    id: str
    round: int | None = None
    worker: str = ""
    component: str = ""
    mechanism: str | None = None
    task: str = ""
    state: str = "planned"
    reason: str | None = None
    detail: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: str = ""
    """Progress of a comparison under way, like `3/12`."""
    told: set[str] = field(default_factory=set)
    """States and reasons that a line of this attempt has told already, in other words."""


@dataclass
class RunState:
    """Everything on the screen."""

    deployment: str = ""
    run_id: str = ""
    phase: str = "starting"
    detail: str = ""
    round: int | None = None
    attempts: dict[str, AttemptLine] = field(default_factory=dict)
    cheats: list[tuple[str, bool, str]] = field(default_factory=list)
    """Planted cheats: name, caught, what the gate said."""
    self_test: str = ""
    calibration: str = ""
    gaps: dict[str, Any] = field(default_factory=dict)
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    merged: list[tuple[str, float | None, float | None, float | None]] = field(default_factory=list)
    """Attempt and mechanism, gain of the step, interval."""
    budget: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    done: dict[str, Any] | None = None
    started: float = field(default_factory=time.time)

    def apply(self, kind: str, data: dict[str, Any]) -> list[str]:
        """Fold one event in; returns the plain lines that announce it (none for mere progress)."""
        reader = getattr(self, f"_{kind.replace('-', '_')}", None)
        lines: list[str] = reader(data) if callable(reader) else []
        now = time.time()
        self.events = [*self.events, *((now, line) for line in lines)][-LAST_EVENTS:]
        return lines

    @property
    def total_gain(self) -> float:
        """Product of the merged steps' gains."""
        product = 1.0
        for _, gain, _, _ in self.merged:
            product *= gain or 1.0
        return product

    def _phase(self, data: dict[str, Any]) -> list[str]:
        self.phase, self.detail = str(data.get("name", "")), str(data.get("detail", ""))
        words = self.phase.split()
        if len(words) == 2 and words[0] == "round" and words[1].isdigit():
            self.round = int(words[1])
        if data.get("attempt"):
            self.detail = f"{label(self._line(data))}: {self.detail}"
        return [f"{self.phase}: {self.detail}" if self.detail else self.phase]

    def _calibration(self, data: dict[str, Any]) -> list[str]:
        self.calibration = (
            f"near-tie up to {number(data.get('epsilon'), '.4f')} nats, at most "
            f"{number(data.get('near_tie_rate_limit'), '.2%')} of positions"
        )
        positions = count(data.get("positions", "?"), "position")
        return [
            f"calibration: {self.calibration} ({positions} of the reference against itself)",
            *([f"baseline against the reference: {data['baseline_note']}"] if data.get("baseline_note") else []),
        ]

    def _selftest(self, data: dict[str, Any]) -> list[str]:
        if "cheat" not in data:
            lines = [line for outcome in data.get("outcomes") or [] for line in self._selftest(outcome)]
            return lines + (self._selftest_end(data) if "passed" in data else [])
        name, caught = str(data["cheat"]), bool(data.get("caught"))
        got = str(data.get("got") or "not rejected")
        said = f"rejected ({got})" if caught else f"MISSED: {got}, expected {', '.join(data.get('expected') or [])}"
        if name not in [cheat for cheat, _, _ in self.cheats]:
            self.cheats.append((name, caught, got))
        return [f"cheat {name}: {said}"]

    def _selftest_end(self, data: dict[str, Any]) -> list[str]:
        caught = data.get("caught", sum(c for _, c, _ in self.cheats))
        total = data.get("cheats", len(self.cheats))
        null = data.get("null_ratio")
        pair = "" if null is None else f"; A/A pair {null:.3f}x {interval(data.get('null_low'), data.get('null_high'))}"
        verdict = "passed" if data.get("passed") else "FAILED"
        self.self_test = f"{verdict}: {caught} of {total} planted cheats rejected{pair}"
        return [f"gate self-test {self.self_test}"]

    def _baseline(self, data: dict[str, Any]) -> list[str]:
        figures = data.get("variants") or ({data["name"]: data} if "name" in data else {})
        self.baselines.update({str(k): dict(v) for k, v in figures.items()})
        self.ratios = list(data.get("ratios") or self.ratios)
        return [
            f"baseline {name}: {number(v.get('decode_tokens_per_s'), '.1f')} tokens/s, "
            f"accepted length {number(v.get('accepted_length'), '.2f')}"
            for name, v in figures.items()
        ]

    def _prompts(self, data: dict[str, Any]) -> list[str]:
        self.detail = f"{data.get('done', '?')} of {count(data.get('of', '?'), 'prompt')} answered by every engine"
        return [f"{self.phase}: {self.detail}"]

    def _doing(self, data: dict[str, Any]) -> list[str]:
        self.detail = str(data.get("text", ""))
        if self.detail and data.get("attempt"):
            self.detail = f"{label(self._line(data))}: {self.detail}"
        return [f"{self.phase}: {self.detail}"] if self.detail else []

    def _extended(self, data: dict[str, Any]) -> list[str]:
        minutes, rounds = data.get("wall_clock_minutes"), data.get("rounds")
        told = [] if minutes is None else [f"{float(minutes):.1f} minutes"]
        told += [] if rounds is None else [count(rounds, "round")]
        return [f"given more: the run may take {' and '.join(told)} in all"] if told else []

    def _gaps(self, data: dict[str, Any]) -> list[str]:
        self.gaps = data
        rows = sorted(data.get("rows") or [], key=lambda row: -row.get("recoverable_ms", 0.0))[:3]
        most = ", ".join(f"{r['component']} {r['recoverable_ms']:.1f} ms" for r in rows)
        return [
            f"profile: round {number(data.get('round_ms'), '.1f')} ms timed (tracing off), "
            f"{number(data.get('share_of_bound'), '.0%')} of the bound; most recoverable, profiled (tracing on): {most or 'nothing'}",
            *(f"profile warning: {warning}" for warning in data.get("warnings") or []),
        ]

    def _line(self, data: dict[str, Any]) -> AttemptLine:
        name = str(data.get("id") or data.get("attempt") or data.get("attempt_id") or "?")
        return self.attempts.setdefault(name, AttemptLine(name))

    def _attempt(self, data: dict[str, Any]) -> list[str]:
        line = self._line(data)
        before = (line.state, line.reason)
        for key in ("round", "worker", "component", "mechanism", "task", "state", "reason", "detail"):
            if data.get(key) is not None:
                setattr(line, key, data[key])
        if (line.state, line.reason) == before and line.state != "planned":
            return []
        if line.state in TOLD_OTHERWISE or (line.state == "working" and line.worker != "external"):
            return []
        if line.state == "accepted" and "passed" in line.told:
            return []
        why = f" ({line.reason})" if line.reason else ""
        new = line.reason and line.reason not in line.told
        told = f": {line.detail.splitlines()[0]}" if new and line.detail else ""
        return [f"{label(line)}: {line.state}{why}{told}"]

    def _pair(self, data: dict[str, Any]) -> list[str]:
        line = self._line(data)
        line.pairs = f"{data.get('pair', '?')}/{data.get('of', '?')}"
        line.gain, line.low, line.high = data.get("mean"), data.get("low"), data.get("high")
        return []

    def _comparison(self, data: dict[str, Any]) -> list[str]:
        line = self._line(data)
        line.pairs = ""
        line.gain, line.low, line.high = data.get("ratio"), data.get("low"), data.get("high")
        line.told.add("no-gain")
        return [
            f"{label(line)}: measured {ratio(line.gain)} {interval(line.low, line.high)}, {data.get('decision', '?')} "
            f"after {count(len(data.get('pairs') or []), 'pair')}"
        ]

    def _verdict(self, data: dict[str, Any]) -> list[str]:
        line = self._line(data)
        line.told.add("passed" if data.get("passed") else str(data.get("reason")))
        if data.get("passed"):
            told = f"passed: {tally(data)}"
        else:
            told = f"REJECTED ({data.get('reason')}): {str(data.get('detail', '')).splitlines()[0] if data.get('detail') else ''}"
        return [f"{label(line)}: gate {told}"]

    def _merge(self, data: dict[str, Any]) -> list[str]:
        line = self._line(data)
        line.mechanism = data.get("mechanism") or line.mechanism
        name = label(line)
        if not data.get("merged"):
            return [f"merge {name}: left out ({data.get('reason')})"]
        if "merged" not in line.told:
            line.told.add("merged")
            self.merged.append((name, data.get("gain"), data.get("low"), data.get("high")))
        told = f"{ratio(data.get('gain'))} {interval(data.get('low'), data.get('high'))}"
        return [f"merge {name}: {told}, so far {self.total_gain:.2f}x"]

    def _left_out(self, data: dict[str, Any]) -> list[str]:
        told = (
            f"worth {ratio(data.get('gain'))} {interval(data.get('low'), data.get('high'))}: "
            if data.get("gain")
            else ""
        )
        why = f" ({data['detail']})" if data.get("detail") else ""
        name = both(str(data.get("attempt_id") or ""), str(data.get("name", "?")))
        return [f"left out {name}: {told}{str(data.get('outcome', '?')).replace('-', ' ')}{why}"]

    def _trial(self, data: dict[str, Any]) -> list[str]:
        values = setting(data.get("values") or {})
        got = "failed" if data.get("ratio") is None else ratio(data["ratio"])
        return [f"{data.get('worker', 'search')} {data.get('arm', '')} {values}: {got}".replace("  ", " ")]

    def _budget(self, data: dict[str, Any]) -> list[str]:
        self.budget = {**self.budget, **data}
        if isinstance(data.get("elapsed_s"), int | float):
            self.started = time.time() - float(data["elapsed_s"])  # time of earlier sessions counts, too
        return []

    def _note(self, data: dict[str, Any]) -> list[str]:
        level = str(data.get("level", "info"))
        text = str(data.get("text", "")).strip()
        return [text if level == "info" else f"{level}: {text}"] if text else []

    def _ended(self, data: dict[str, Any]) -> list[str]:
        self.phase, self.detail = "ended", str(data.get("stop", ""))
        go_on = f"; finished steps are kept, go on with: {data['resume']}" if data.get("resume") else ""
        return [f"ended before its end: {self.detail}{go_on}"]

    def _done(self, data: dict[str, Any]) -> list[str]:
        self.done = data
        self.phase, self.detail = "done", str(data.get("stop", ""))
        return [f"done: {data.get('stop', '')}"] + ([f"report: {data['report']}"] if data.get("report") else [])


TOLD_OTHERWISE = ("measured", "gated", "merged")
"""States whose news the events `comparison`, `verdict` and `merge` tell."""


def lines_of(events: Iterable[tuple[float, str, dict[str, Any]]]) -> Iterator[tuple[float, str, str]]:
    """Events of a journal (seconds since the epoch, kind, fields) in words: time, kind and line, none for mere progress."""
    state = RunState()
    for at, kind, data in events:
        try:
            lines = state.apply(kind, data)
        except MALFORMED:
            lines = []
        yield from ((at, kind, line) for line in lines)


def label(line: AttemptLine) -> str:
    """How an attempt is called in a line of text: its id, and its mechanism; before it has one, its task or component."""
    task = line.task if len(line.task) <= TASK_LETTERS else line.task[: TASK_LETTERS - 3] + "..."
    own = task if line.worker == "search" else ""
    return both(line.id, line.mechanism or own or line.component)


def both(attempt: str, name: str) -> str:
    """An attempt's two names: `r3-search-1 set-prefill-chunk-38`; the one that there is, where the other is missing or the same."""
    return " ".join(dict.fromkeys(word for word in (attempt, name) if word))


def setting(values: dict[str, Any]) -> str:
    """Tunables and their values, like `verify_drafts=4 pack_rows=8`."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def tally(found: dict[str, Any]) -> str:
    """What token forcing counted, from the fields of `contracts.Verdict`."""
    forced, ties = count(found.get("positions", 0), "token"), count(found.get("near_ties", 0), "near-tie")
    return f"{forced} forced, {found.get('exact', 0):,} exact, {ties}, {count(found.get('violations', 0), 'violation')}"


def number(value: Any, form: str) -> str:
    """A formatted number, or a dash."""
    return format(value, form) if isinstance(value, int | float) else "-"


def ratio(value: Any) -> str:
    """A ratio, like 1.234x."""
    return f"{value:.3f}x" if isinstance(value, int | float) else "-"


def interval(low: Any, high: Any) -> str:
    """An interval in brackets; empty without one."""
    return f"[{low:.3f}, {high:.3f}]" if isinstance(low, int | float) and isinstance(high, int | float) else ""


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
