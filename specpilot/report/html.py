"""The report as one self-contained HTML file: no script, no outside request, everything escaped.

Reads a `ReportData`, writes one file. What is computed here is only for drawing (bar positions, sums of shown rows).
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from specpilot.errors import disk_full_named
from specpilot.report.charts import forest, roofline
from specpilot.report.data import Fate, ReportData
from specpilot.report.state import clock
from specpilot.words import count


@dataclass(frozen=True)
class Bar:
    """One row of the waterfall: from `start` to `end` times stock, with positions in per cent of the axis."""

    name: str
    kind: str
    """`total`, `gain`, `loss` or `rest` (what no step explains)."""
    start: float
    end: float
    told: str
    interval: str
    left: float
    width: float


@dataclass(frozen=True)
class ComponentBar:
    """One component's time before and after, widths in per cent of the longest."""

    name: str
    before: float | None
    after: float | None
    bound: float | None
    ratio: float | None
    before_width: float
    after_width: float
    bound_left: float


def render_report(data: ReportData) -> str:
    """The whole page as text."""
    template = _environment().get_template("report.html.j2")
    tops = [f.comparison.high for f in data.attempts if f.comparison]
    return template.render(
        data=data,
        bars=waterfall(data),
        components=components(data),
        roofline=roofline(data.gaps_before, data.gaps_after),
        forests={fate.id: _forest(fate, max(tops, default=1.25)) for fate in data.attempts},
        sorted_rows=_rows(data),
        forced=sum(f.verdict.positions for f in data.attempts if f.verdict),
    )


def write_report(data: ReportData, path: Path) -> Path:
    """Write the page to `path`, all or nothing; returns the path. Raises `DiskFullError` when the disk is full."""
    text = render_report(data)
    with disk_full_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(scratch, 0o644)
            os.replace(scratch, path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("specpilot.report", "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        times=_times, span=_span, when=_when, clock=clock, fixed=_fixed, percent=_percent, count=count
    )
    return environment


def waterfall(data: ReportData) -> list[Bar]:
    """From stock (1.0) over every merged step's own measured gain to the total of the closing session."""
    total = data.ratio("final", "stock")
    if total is None and not data.steps:
        return []
    spans: list[tuple[str, str, float, float, str, str]] = [("stock", "total", 0.0, 1.0, "1.00×", "")]
    level = 1.0
    for step in data.steps:
        kind = "gain" if step.gain >= 1 else "loss"
        spans.append((step.names, kind, level, level * step.gain, _times(step.gain), _span(step.low, step.high)))
        level *= step.gain
    if total is not None:
        rest = total.ratio / level
        spans.append(("not explained by the steps", "rest", level, total.ratio, _times(rest), ""))
        spans.append(("final", "total", 0.0, total.ratio, _times(total.ratio), _span(total.low, total.high)))
    top = max(max(s[2], s[3]) for s in spans)
    return [
        Bar(name, kind, start, end, told, interval, 100 * min(start, end) / top, max(0.4, 100 * abs(end - start) / top))
        for name, kind, start, end, told, interval in spans
    ]


def components(data: ReportData) -> list[ComponentBar]:
    """Time per round of every component, the longest first."""
    tables = (data.gaps_before, data.gaps_after)
    rows = [{row.component: row for row in table.rows} if table else {} for table in tables]
    names = list(dict.fromkeys([*rows[0], *rows[1]]))
    longest = max((row.measured_ms for table in rows for row in table.values()), default=0.0)
    if not longest:
        return []
    found = []
    for name in names:
        before, after = (table[name].measured_ms if name in table else None for table in rows)
        bound_row = rows[1].get(name) or rows[0].get(name)
        bound = bound_row.bound_ms if bound_row else None
        scale = 100 / longest
        found.append(
            ComponentBar(
                name,
                before,
                after,
                bound,
                before / after if before and after else None,
                (before or 0) * scale,
                (after or 0) * scale,
                min((bound or 0) * scale, 100),
            )  # fmt: skip
        )
    return sorted(found, key=lambda bar: -(bar.before or bar.after or 0.0))


def _rows(data: ReportData) -> list[Any]:
    """Rows of the newest gap table, most recoverable first."""
    table = data.gaps_after or data.gaps_before
    return sorted(table.rows, key=lambda row: -row.recoverable_ms) if table else []


def _forest(fate: Fate, top: float) -> Any:
    found = fate.comparison
    if found is None:
        return forest(None, None, None, None, top)
    return forest(found.ratio, found.low, found.high, fate.predicted_gain, top)


def _times(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}×"


def _span(low: float | None, high: float | None, digits: int = 2) -> str:
    return "" if low is None or high is None else f"{low:.{digits}f}–{high:.{digits}f}"


def _fixed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def _when(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
