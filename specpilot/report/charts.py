"""Drawings of the report: inline SVG with no script and no outside resource. Colours come from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from specpilot.contracts import GapTable

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 140, 22, 50
SHOWN_SHARE = 0.03
"""Components below this share of both rounds are left out of the plot."""


@dataclass(frozen=True)
class Point:
    """One component in the roofline plot: operations per byte against GFLOP/s reached."""

    name: str
    intensity: float
    before: float | None
    after: float | None


class Log:
    """A logarithmic axis from values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = math.log10(low), math.log10(high), start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every decade; only decades where there are more than three."""
        steps = (1,) if self.high - self.low > 3 else (1, 2, 5)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [step * 10.0**decade for decade in decades for step in steps]
        return [value for value in values if self.low <= math.log10(value) <= self.high]


def points(before: GapTable | None, after: GapTable | None) -> list[Point]:
    """Components worth a place in the plot, whichever table has them."""
    names: dict[str, None] = {}
    for table in (before, after):
        for row in table.rows if table else ():
            if row.share >= SHOWN_SHARE:
                names[row.component] = None
    found = []
    for name in names:
        intensity = next(
            (i for t in (after, before) if t and (i := t.hardware.get("intensity", {}).get(name, 0)) > 0), 0
        )
        rates = [_rate(table, name) for table in (before, after)]
        if intensity > 0 and any(rates):
            found.append(Point(name, intensity, rates[0], rates[1]))
    return found


def _rate(table: GapTable | None, name: str) -> float | None:
    """GFLOP/s that a component reached."""
    if table is None:
        return None
    operations = table.hardware.get("operations", {}).get(name, 0.0)
    measured = next((row.measured_ms for row in table.rows if row.component == name), 0.0)
    return operations / measured * 1e-6 if operations and measured else None


def roofline(before: GapTable | None, after: GapTable | None) -> Markup:
    """The roofline plot, log-log; empty when there is nothing to show."""
    table = after or before
    found = points(before, after)
    if table is None or not found or not {"bandwidth_gbs", "peak_gflops"} <= table.hardware.keys():
        return Markup("")
    bandwidth, peak = float(table.hardware["bandwidth_gbs"]), _peak(table)
    ridge = peak / bandwidth
    rates = [rate for p in found for rate in (p.before, p.after) if rate]
    x = Log(
        min([p.intensity for p in found] + [ridge]) / 2.5,
        max([p.intensity for p in found] + [ridge]) * 3,
        LEFT,
        WIDTH - RIGHT,
    )
    y = Log(min(rates) / 1.7, peak * 1.6, HEIGHT - BOTTOM, TOP)
    body = [*_grid(x, y), *_roof(x, y, bandwidth, peak), *_marks(x, y, found)]
    title = "Roofline plot of the decode round's components before and after"
    told = "; ".join(
        f"{p.name} at {p.intensity:.1f} operations per byte reached "
        + ", then ".join(f"{rate:.1f} GFLOP/s" for rate in (p.before, p.after) if rate)
        for p in found
    )
    description = f"Roof: {bandwidth:.1f} GB/s and {peak:.0f} GFLOP/s. {told}."
    return (
        Markup(
            '<svg class="roofline" viewBox="0 0 {w} {h}" role="img" aria-labelledby="roof-title roof-text">'
            '<title id="roof-title">{title}</title><desc id="roof-text">{text}</desc>'
        ).format(w=WIDTH, h=HEIGHT, title=title, text=description)
        + Markup("").join(body)
        + Markup("</svg>")
    )


def _peak(table: GapTable) -> float:
    peaks = table.hardware["peak_gflops"]
    gpu = table.hardware.get("kind") == "gpu" and "bfloat16" in peaks
    return float(peaks["bfloat16"] if gpu else peaks["float32"])


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start", turn: float = 0.0) -> Markup:
    turned = Markup(' transform="rotate({:.1f} {:.1f} {:.1f})"').format(turn, x, y) if turn else Markup("")
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}"{}>{}</text>').format(
        x, y, kind, anchor, turned, words
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def _grid(x: Log, y: Log) -> list[Markup]:
    found = []
    for value in x.ticks():
        found.append(_line(x(value), TOP, x(value), HEIGHT - BOTTOM, "grid"))
        found.append(_text(x(value), HEIGHT - BOTTOM + 18, f"{value:g}", "tick", "middle"))
    for value in y.ticks():
        found.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"))
        found.append(_text(LEFT - 8, y(value) + 4, f"{value:g}", "tick", "end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    found.append(_text(middle, HEIGHT - 10, "operations per byte from memory", "axis", "middle"))
    found.append(_text(16, (TOP + HEIGHT - BOTTOM) / 2, "GFLOP/s", "axis", "middle", -90))
    return found


def _roof(x: Log, y: Log, bandwidth: float, peak: float) -> list[Markup]:
    ridge, low, high = peak / bandwidth, 10**x.low, 10**x.high
    start = max(low, 10**y.low / bandwidth)
    path = Markup('<path d="M{:.1f} {:.1f} L{:.1f} {:.1f} L{:.1f} {:.1f}" class="roof"/>').format(
        x(start), y(start * bandwidth), x(ridge), y(peak), x(high), y(peak)
    )
    slope = math.degrees(math.atan2(y(peak) - y(start * bandwidth), x(ridge) - x(start)))
    middle = math.sqrt(start * ridge)
    return [
        path,
        _text(x(middle) - 6, y(middle * bandwidth) - 9, f"memory {bandwidth:.1f} GB/s", "rooflabel", "middle", slope),
        _text(x(high) - 4, y(peak) - 9, f"peak {peak:.0f} GFLOP/s", "rooflabel", "end"),
    ]


def _marks(x: Log, y: Log, found: Sequence[Point]) -> list[Markup]:
    """Hollow dots before, full dots after, a line between, and labels at the right that do not collide."""
    leaders: list[Markup] = []
    marks: list[Markup] = []
    anchors = [(p, at, y(p.after or p.before or 1.0)) for p, at in zip(found, _side_by_side(x, found), strict=True)]
    spread = spread_out([anchor[2] for anchor in anchors], 17.0, TOP + 8, HEIGHT - BOTTOM - 4)
    for (point, at_x, at_y), label_y in zip(anchors, spread, strict=True):
        label_x = WIDTH - RIGHT + 14
        leaders.append(_line(at_x, at_y, label_x - 4, label_y - 4, "leader"))
        if point.before and point.after:
            marks.append(_line(at_x, y(point.before), at_x, y(point.after), "rise"))
        kind = "draft" if point.name.startswith("draft.") else "target"
        for rate, when in ((point.before, "before"), (point.after, "after")):
            if rate:
                marks.append(
                    Markup('<circle cx="{:.1f}" cy="{:.1f}" r="5.5" class="{} {}"/>').format(at_x, y(rate), when, kind)
                )
        marks.append(_text(label_x, label_y, point.name, "label"))
    return leaders + marks


def _side_by_side(x: Log, found: Sequence[Point]) -> list[float]:
    """Pixel positions; points of (nearly) the same intensity stand next to each other instead of on top."""
    places = [x(point.intensity) for point in found]
    shifted = list(places)
    for index, place in enumerate(places):
        group = [i for i, other in enumerate(places) if abs(other - place) < 6.0]
        shifted[index] = place + 12.0 * (group.index(index) - (len(group) - 1) / 2)
    return spread_out(shifted, 12.0, LEFT, WIDTH - RIGHT)


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart, kept within [low, high] as far as they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    last = low - gap
    for index in order:
        last = placed[index] = max(wanted[index], last + gap)
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def forest(ratio: float | None, low: float | None, high: float | None, predicted: float | None, top: float) -> Markup:
    """One row's interval on a shared scale from 0.8 to `top`; the line is 1, the tick what was predicted."""
    if ratio is None:
        return Markup("")
    width, height, left = 150.0, 20.0, 0.8
    at = Log(left, max(top, 1.25), 4, width - 4)

    def place(value: float) -> float:
        return at(min(max(value, left), max(top, 1.25)))

    parts = [_line(place(1.0), 1, place(1.0), height - 1, "one")]
    if low is not None and high is not None:
        parts.append(_line(place(low), height / 2, place(high), height / 2, "whisker"))
    if predicted is not None:
        parts.append(_line(place(predicted), 3, place(predicted), height - 3, "predicted"))
    parts.append(
        Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" class="{}"/>').format(
            place(ratio), height / 2, "up" if (low or ratio) > 1 else "flat"
        )
    )
    words = f"ratio {ratio:.3f}" + (
        f", interval {low:.3f} to {high:.3f}" if low is not None and high is not None else ""
    )
    words += f", predicted {predicted:.2f}" if predicted is not None else ""
    return (
        Markup('<svg class="forest" viewBox="0 0 {w} {h}" role="img" aria-label="{a}">').format(
            w=int(width), h=int(height), a=escape(words)
        )
        + Markup("").join(parts)
        + Markup("</svg>")
    )
