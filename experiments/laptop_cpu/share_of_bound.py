"""How close engines of a finished run come to this machine's bound: `python experiments/laptop_cpu/share_of_bound.py RUN`.

Starts the stock engine and every merged step of the run, profiles each, and prints the gap tables. The roofs are measured
before and after each. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from specpilot.loop.machine import measure_again  # noqa: E402
from specpilot.loop.observe import profile_engine  # noqa: E402
from specpilot.loop.run import open_run  # noqa: E402
from specpilot.loop.state import mechanism_of, merge_records  # noqa: E402
from specpilot.paths import find_run  # noqa: E402


def main() -> None:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="latest")
    options = parser.parse_args()
    console = Console(width=140)
    with open_run(find_run(options.run)) as context:
        commits = {"stock": context.trees.first_commit}
        for merged in merge_records(context):
            attempt = context.journal.attempt(merged.attempt_id)
            commits[f"+ {mechanism_of(attempt) or attempt.id}"] = merged.after
        for name, commit in commits.items():
            key = f"share-{commit[:12]}"
            before = measure_again(context)
            with context.engine(commit, "stock" if name == "stock" else "final", key) as server:
                table = profile_engine(context, key, server, before)
            console.print(
                f"{name:24s} round {table.round_ms:6.1f} ms, bound {table.bound_ms:5.1f} ms, share {table.share_of_bound:4.0%}, "
                f"accepted length {table.accepted_length:.2f}, "
                f"roofs {table.hardware['bandwidth_gbs']:.1f} GB/s, {table.hardware['peak_gflops']['float32']:.0f} GFLOP/s"
            )
            for gap in table.rows[:6]:
                console.print(
                    f"    {gap.component:18s} {gap.measured_ms:7.2f} ms, bound {gap.bound_ms:6.2f} ms ({gap.limit})"
                )
            for warning in table.warnings:
                console.print(f"    {warning}")
        context.trees.prune_unknown(context.journal.open_outside())


if __name__ == "__main__":
    main()
