"""The closing summary that a run prints: what was gained, by what, how sure it is, and what to do next."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specpilot.report.data import Ratio, ReportData
from specpilot.report.state import clock, interval, number
from specpilot.words import count


def final_summary(data: ReportData) -> RenderableType:
    """A rich renderable; reads well without colour and in 80 columns."""
    parts: list[RenderableType] = [Text(""), Text(f"{data.deployment}  {data.run_id}", style="bold")]
    parts += [Text(line, style="bold green") for line in headline(data)]
    if data.figures:
        parts += [Text(""), figures_table(data)]
    if data.steps:
        parts += [Text(""), steps_table(data)]
    if data.left_out:
        parts += [Text(""), left_out_table(data)]
    parts += [Text(""), *(Text(line) for line in facts(data))]
    parts += [Text(f"note: {note}", style="yellow") for note in data.notes]
    if data.commands:
        parts.append(Text(""))
        width = max(len(command.what) for command in data.commands)
        parts += [Text(f"{c.what:<{width}}  {c.command}", style="cyan", no_wrap=True) for c in data.commands]
    return Group(*parts)


def headline(data: ReportData) -> list[str]:
    """The ratios that a reader wants first; none is quoted without what it is against."""
    lines = []
    for of, over, words in (
        ("final", "stock", "over the stock speculative engine"),
        ("final", "ar", "over plain autoregression (ar)"),
        ("final-ar", "ar", "over ar with speculation off, so by the systems work alone"),
    ):
        found = data.ratio(of, over)
        if found is not None:
            lines.append(f"{of:<8} {quote(found)} {words}")
    if not lines:
        lines.append("no closing measurement: the run ended before it")
    if data.share_of_bound:
        lines.append(
            f"         {data.share_of_bound:.0%} of the bound for this machine, by the roof measured around it"
        )
    return lines


def quote(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return f"{ratio.ratio:.2f}x {interval(ratio.low, ratio.high)}".strip()


def figures_table(data: ReportData) -> Table:
    """The four named engines side by side."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, justify in (
        ("engine", "left"), ("tokens/s", "right"), ("end to end", "right"), ("accepted length", "right"), ("first token s", "right"),
    ):  # fmt: skip
        grid.add_column(name, justify=justify)  # type: ignore[arg-type]
    for figure in data.figures:
        grid.add_row(
            figure.name,
            f"{figure.decode_tokens_per_s:.1f}",
            number(figure.end_to_end_tokens_per_s, ".1f"),
            number(figure.accepted_length, ".2f"),
            number(figure.ttft_s, ".2f"),
        )
    return grid


def steps_table(data: ReportData) -> Table:
    """Merged steps with their own measured gains, and what they leave unexplained."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("merged")
    grid.add_column("gain", justify="right")
    grid.add_column("interval")
    for step in data.steps:
        grid.add_row(step.names, f"{step.gain:.3f}x", interval(step.low, step.high))
    if data.unexplained is not None:
        grid.add_row(Text("not explained by the steps", style="dim"), f"{data.unexplained:.3f}x", "")
    return grid


def left_out_table(data: ReportData) -> Table:
    """What each merged change is worth in the final engine."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("left out")
    grid.add_column("worth", justify="right")
    grid.add_column("interval")
    grid.add_column("", overflow="fold")
    for item in data.left_out:
        worth = f"{item.gain:.3f}x" if item.gain is not None else "-"
        grid.add_row(item.names, worth, interval(item.low, item.high), item.words)
    return grid


def facts(data: ReportData) -> list[str]:
    """Counts, gate, memory, stop reason."""
    merged = sum(a.state == "merged" for a in data.attempts)
    tried = count(data.trials, "setting")
    lines = [f"attempts {len(data.attempts)}, merged {merged}, {tried} searched"]
    if data.self_test is not None:
        caught = sum(c.caught for c in data.self_test.outcomes)
        lines.append(
            f"gate     {caught} of {count(len(data.self_test.outcomes), 'planted cheat')} rejected"
            + (f", A/A pair {data.self_test.null_ratio:.3f}x" if data.self_test.null_ratio else "")
        )
    forced = [a.verdict for a in data.attempts if a.verdict is not None and a.verdict.positions]
    if forced:
        lines.append(
            f"forcing  {count(sum(v.positions for v in forced), 'token')} forced through the reference "
            f"over {count(len(forced), 'candidate')}"
        )
    if data.memory.recalled or data.memory.learned:
        helped = f", together {data.memory.gain:.2f}x" if data.memory.gain else ""
        lines.append(
            f"memory   {count(data.memory.recalled, 'mechanism')} recalled, {data.memory.tried} tried, "
            f"{data.memory.merged} merged{helped}; {count(data.memory.learned, 'effect')} learned"
        )
    if data.noise:
        lines.append(f"noise    {data.noise}")
    used = clock(data.elapsed_s) if data.elapsed_s is not None else "-"
    limit = f" of {clock(data.limit_s)}" if data.limit_s else ""
    lines.append(f"stopped  {data.stop_reason or 'unknown'} after {used}{limit}")
    return lines
