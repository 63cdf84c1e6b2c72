"""The parts of the live screen, each a function from the state to something rich can draw."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from specpilot.report.state import AttemptLine, RunState, clock, interval, label, number, ratio

STATE_STYLE = {
    "merged": "bold green",
    "accepted": "green",
    "rejected": "red",
    "superseded": "yellow",
    "working": "cyan",
    "submitted": "cyan",
    "measured": "cyan",
    "gated": "cyan",
    "planned": "dim",
}
_OPEN = ("planned", "working", "submitted", "measured", "gated")


DROPPED_FIRST = ("baselines", "gate", "log", "profile", "accepted")
"""What gives way on a small terminal, in this order; header, time and attempts stay."""


def screen(state: RunState, console: Console) -> RenderableType:
    """The whole screen; parts give way where the terminal has not enough lines."""
    height = console.size.height - 1
    room = max(3, (height - 20) // 2)
    parts: dict[str, RenderableType | None] = {
        "gate": gate(state),
        "baselines": baselines(state),
        "profile": gap_rows(state, min(room, 6)),
        "attempts": attempts(state, room),
        "accepted": accepted(state),
        "log": log(state),
    }
    top = Group(header(state), budget(state))
    shown = {name: _titled(name, part) for name, part in parts.items() if part is not None}
    lines = {name: len(console.render_lines(part, pad=False)) for name, part in shown.items()}
    free = height - len(console.render_lines(top, pad=False)) - sum(lines.values())
    for name in DROPPED_FIRST:
        if free < 0 and shown.pop(name, None) is not None:
            free += lines[name]
    return Group(top, *shown.values())


def _titled(name: str, part: RenderableType) -> RenderableType:
    rule = Rule(Text(name, style="bold"), align="left", style="dim", characters="─")
    return Group(rule, Padding(part, (0, 0, 0, 2)))


def header(state: RunState) -> Text:
    """Deployment, phase and what is being done."""
    line = Text.assemble(("specpilot ", "bold"), (state.deployment, "bold cyan"), "  ", (state.run_id, "dim"))
    line.append(f"\n{state.phase}", style="bold")
    if state.detail:
        line.append(f"  {state.detail}")
    return line


def budget(state: RunState) -> Text:
    """Time used and left."""
    known = state.budget
    used = time.time() - state.started
    line = Text(f"time {clock(used)}", style="dim")
    limit = known.get("limit_s")
    if isinstance(limit, int | float):
        left = max(0.0, limit - used)
        filled = round(20 * min(1.0, used / limit)) if limit else 20
        line = Text.assemble(
            ("time ", "dim"),
            clock(used),
            " ",
            ("━" * filled, "cyan"),
            ("━" * (20 - filled), "dim"),
            f" {clock(left)} left",
        )
    return line


def gate(state: RunState) -> RenderableType | None:
    """Calibration and the planted cheats: one line each while they come, one line for all once passed."""
    if not state.cheats and not state.calibration:
        return None
    lines = [Text(state.calibration, style="dim")] if state.calibration else []
    missed = [c for c in state.cheats if not c[1]]
    if state.self_test:
        lines.append(
            Text(f"self-test {state.self_test}", style="red" if missed or "FAILED" in state.self_test else "green")
        )
        shown = missed
    else:
        shown = state.cheats[-6:]
    for name, caught, got in shown:
        verdict = ("rejected ", "green") if caught else ("MISSED ", "bold red")
        lines.append(Text.assemble("cheat ", (name, "bold"), ": ", verdict, (f"({got})", "dim")))
    return Group(*lines)


def baselines(state: RunState) -> RenderableType | None:
    """Named engines measured in one session."""
    if not state.baselines:
        return None
    grid = _grid(("engine", "left"), ("tokens/s", "right"), ("accepted length", "right"), ("ratios", "left"))
    for name, figures in state.baselines.items():
        told = [
            f"{ratio(r.get('ratio'))} {r.get('over')} {interval(r.get('low'), r.get('high'))}"
            for r in state.ratios
            if r.get("of") == name
        ]
        length = number(figures.get("accepted_length"), ".2f")
        grid.add_row(name, number(figures.get("decode_tokens_per_s"), ".1f"), length, "  ".join(told))
    return grid


def gap_rows(state: RunState, limit: int) -> RenderableType | None:
    """The components with most recoverable time."""
    rows: list[dict[str, Any]] = list(state.gaps.get("rows") or [])
    if not rows:
        return None
    grid = _grid(
        ("component", "left"), ("ms", "right"), ("bound", "right"), ("share", "right"), ("", "left"), ("worth", "right")
    )
    for row in sorted(rows, key=lambda r: -r.get("recoverable_ms", 0.0))[:limit]:
        share = float(row.get("share") or 0.0)
        grid.add_row(
            str(row.get("component")),
            number(row.get("measured_ms"), ".2f"),
            number(row.get("bound_ms"), ".2f"),
            f"{share:.0%}",
            Text("█" * max(1, round(share * 24)) if share else "", style="cyan"),
            ratio(row.get("expected_gain")),
        )
    bound = (
        f"components profiled, tracing on; round {number(state.gaps.get('round_ms'), '.1f')} ms timed, tracing off, "
        f"{number(state.gaps.get('share_of_bound'), '.0%')} of the bound"
    )
    warnings = [Text(f"warning: {w}", style="yellow") for w in (state.gaps.get("warnings") or [])[:2]]
    return Group(grid, Text(bound, style="dim"), *warnings)


def attempts(state: RunState, limit: int) -> RenderableType | None:
    """Attempts of this round; those under way first when there is not room for all."""
    found = [a for a in state.attempts.values() if state.round is None or a.round in (None, state.round)]
    if not found:
        return None
    if len(found) > limit:
        found = sorted(found, key=lambda a: a.state not in _OPEN)[:limit]
    grid = _grid(("attempt", "left"), ("worker", "left"), ("state", "left"), ("ratio", "right"), ("", "left"))
    for line in found:
        grid.add_row(
            label(line),
            line.worker,
            Text(line.state, style=STATE_STYLE.get(line.state, "")),
            ratio(line.gain),
            Text(_aside(line), style="dim", overflow="ellipsis", no_wrap=True),
        )
    return grid


def _aside(line: AttemptLine) -> str:
    if line.pairs:
        return f"pair {line.pairs} {interval(line.low, line.high)}"
    if line.reason:
        return line.reason
    return interval(line.low, line.high)


def accepted(state: RunState) -> RenderableType | None:
    """What is merged so far, each step with its own gain."""
    if not state.merged:
        return None
    grid = _grid(("mechanism", "left"), ("gain", "right"), ("interval", "left"))
    for name, gain, low, high in state.merged:
        grid.add_row(Text(name, style="green"), ratio(gain), interval(low, high))
    return Group(grid, Text(f"product of steps {state.total_gain:.2f}x", style="bold green"))


def log(state: RunState) -> RenderableType | None:
    """The last lines."""
    if not state.events:
        return None
    return Group(
        *(
            Text.assemble(
                (time.strftime("%H:%M:%S ", time.localtime(at)), "dim"),
                (line, _tone(line)),
                no_wrap=True,
                overflow="ellipsis",
            )
            for at, line in state.events[-6:]
        )
    )


def _tone(line: str) -> str:
    if line.startswith(("error:", "warning:", "profile warning:")) or "MISSED" in line:
        return "yellow"
    return ""


def _grid(*columns: tuple[str, Any]) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in columns:
        grid.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    return grid
