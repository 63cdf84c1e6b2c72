"""Terminal rendering of machines, bounds and gap tables, with rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .gaps import GapTable
from .hardware import Hardware

_LIMIT_STYLE = {"bandwidth": "cyan", "compute": "magenta", "launch": "yellow"}


def rich_table(table: GapTable, *, title: str | None = None) -> RenderableType:
    """The gap table for the terminal; measured columns are left out where nothing was measured."""
    measured = table.round_ms > 0 and any(row.measured_ms for row in table.rows)
    # One blank between columns: with the components' usual names the table is 78 wide, and so fits a plain terminal.
    grid = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 1, 0, 0))
    grid.add_column("component", overflow="fold", min_width=9)
    if measured:
        grid.add_column("ms", justify="right", no_wrap=True)
    grid.add_column("bound ms", justify="right", no_wrap=True)
    grid.add_column("limit", no_wrap=True)
    if measured:
        for name in ("of bound", "share", "recoverable", "worth"):
            grid.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        if not measured and row.bound_ms == 0:
            continue
        limit = Text(row.limit, style=_LIMIT_STYLE.get(row.limit, "")) if row.bound_ms else Text("none", style="dim")
        if not measured:
            grid.add_row(row.component, f"{row.bound_ms:.3f}", limit)
            continue
        grid.add_row(
            row.component,
            f"{row.measured_ms:.3f}",
            f"{row.bound_ms:.3f}",
            limit,
            Text(f"{row.ratio:.0%}" if row.bound_ms and row.measured_ms else "-", style="red" if row.ratio > 1 else ""),
            f"{row.share:.1%}",
            f"{row.recoverable_ms:.3f}",
            f"{row.expected_gain:.2f}x",
        )
    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    parts += [grid, Text(summary(table), style="bold")]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in table.warnings]
    return Group(*parts)


def summary(table: GapTable) -> str:
    """Round times, each with how it was measured, and bound with rates: a line for each."""
    at_bound = f"bound {table.bound_ms:.2f} ms a round, {table.tokens_per_s_at_bound:.1f} tokens/s"
    if not table.round_ms:
        return f"{at_bound} at accepted length {table.accepted_length:.2f}"
    return (
        f"round timed, tracing off: {table.round_ms:.2f} ms, {table.tokens_per_s:.1f} tokens/s "
        f"at accepted length {table.accepted_length:.2f}\n"
        f"round profiled, tracing on: {table.profiled_ms:.2f} ms, the components' sum\n"
        f"{at_bound}; {table.share_of_bound:.0%} of the bound"
    )


def machine_table(measured: Hardware, sheet: Hardware | None = None) -> Table:
    """What the machine can do: best-of, median, and a datasheet's figures beside them."""
    grid = Table(
        title=measured.name, title_justify="left", title_style="bold", header_style="bold", pad_edge=False, box=None
    )
    grid.add_column("")
    grid.add_column("median" if measured.source == "measured" else "datasheet", justify="right")
    if measured.best:
        grid.add_column("best pass", justify="right")
    if sheet is not None:
        grid.add_column(sheet.name, justify="right")
    rows: list[tuple[str, str, str, str]] = [
        ("read bandwidth, GB/s", "bandwidth_gbs", "read_gbs", ".1f"),
        ("copy bandwidth, GB/s", "copy_gbs", "copy_gbs", ".1f"),
        ("peak multiply-add, GFLOP/s", "", "fma_gflops", ".0f"),
        ("dependent step, us", "launch_us", "fork_join_us", ".2f"),
        ("ridge, operations per byte", "ridge", "", ".1f"),
    ]
    for label, field, key, form in rows:
        cells = [label, _figure(measured, field, form)]
        if measured.best:
            cells.append(format(measured.best[key], form) if key in measured.best else "")
        if sheet is not None:
            cells.append(_figure(sheet, field, form))
        grid.add_row(*cells)
    return grid


def _figure(hardware: Hardware, field: str, form: str) -> str:
    value = hardware.peak() if not field else getattr(hardware, field)
    return "" if value is None else format(value, form)
