"""The README's results table from a finished run: `python experiments/laptop_cpu/table.py RUN [--readme README.md]`.

Reads the run's journal only. With `--readme` it replaces what stands between the `results` marks of that file.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from specpilot.loop.run import open_run  # noqa: E402
from specpilot.loop.summary import report_data  # noqa: E402
from specpilot.paths import find_run  # noqa: E402
from specpilot.report.data import ReportData  # noqa: E402

MARKS = ("<!-- results:begin -->", "<!-- results:end -->")


def markdown(data: ReportData) -> str:
    """The table with machine, versions, date and command."""
    hardware, software = data.hardware, data.software
    lines = [
        f"One run of `make optimize` on {data.created[:10]}: {hardware.get('name', 'unknown machine')}, "
        f"{hardware.get('bandwidth_gbs', 0):.0f} GB/s read, "
        f"{hardware.get('peak_gflops', {}).get('float32', 0):.0f} GFLOP/s float32 (both measured), "
        f"torch {software.get('torch', '?')}, {software.get('compiler', 'no compiler')}. "
        "Medians over prompts; ratios are paired, with 95 % intervals. Absolute rates wander with the machine; ratios count.",
        "",
        "| engine | decode tokens/s | accepted length | over `ar` | over `stock` |",
        "|---|---|---|---|---|",
    ]
    for figure in data.figures:
        cells = [
            f"`{figure.name}`",
            f"{figure.decode_tokens_per_s:.1f}",
            "" if figure.accepted_length is None else f"{figure.accepted_length:.2f}",
        ]
        for over in ("ar", "stock"):
            ratio = data.ratio(figure.name, over)
            cells.append("" if ratio is None else f"{ratio.ratio:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]")
        lines.append("| " + " | ".join(cells) + " |")
    merged = ", ".join(f"`{step.name}` {step.gain:.2f}×" for step in data.steps)
    share = data.share_of_bound
    forced = sum(fate.verdict.positions for fate in data.attempts if fate.verdict)
    minutes = (data.elapsed_s or 0.0) / 60
    lines += [
        "",
        f"Merged, in order: {merged}. "
        + (
            f"The final engine reaches {share:.0%} of the bound that the cost model gives for this machine. "
            if share
            else ""
        )
        + f"{forced:,} tokens were forced through the reference; the run took {minutes:.1f} minutes. "
        "Made by `python experiments/laptop_cpu/table.py RUN --readme README.md`.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or puts it into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", default="latest")
    parser.add_argument("--readme", type=Path)
    options = parser.parse_args()
    with open_run(find_run(options.run)) as context:
        text = markdown(report_data(context))
    if options.readme is None:
        print(text)
        return
    old = options.readme.read_text(encoding="utf-8")
    between = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)
    options.readme.write_text(between.sub(lambda _: f"{MARKS[0]}\n{text}\n{MARKS[1]}", old), encoding="utf-8")


if __name__ == "__main__":
    main()
