"""How close engines of a finished run come to this machine's bound: `python experiments/laptop_cpu/share_of_bound.py RUN`.

Measures the roofs now, starts the stock engine and every merged step of the run, profiles each, and prints the gap tables.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from specpilot.costmodel.probe import measure_machine  # noqa: E402
from specpilot.loop.observe import profile_engine  # noqa: E402
from specpilot.loop.records import Merged  # noqa: E402
from specpilot.loop.run import open_run  # noqa: E402
from specpilot.paths import find_run  # noqa: E402


def main() -> None:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="latest")
    options = parser.parse_args()
    hardware = measure_machine()
    console = Console()
    console.print(
        f"{hardware.name}: {hardware.bandwidth_gbs:.1f} GB/s, {hardware.peak():.0f} GFLOP/s, best passes {hardware.best}"
    )
    with open_run(find_run(options.run)) as context:
        commits = {"stock": context.trees.first_commit}
        for row in context.journal.steps():
            if "/merge/" in row.key and not row.key.endswith("/assess"):
                merged = context.journal.result(row.key, Merged)
                if merged.merged:
                    name = context.journal.attempt(merged.attempt_id).data.get("mechanism") or merged.attempt_id
                    commits[f"+ {name}"] = merged.after
        for name, commit in commits.items():
            key = f"share-{commit[:12]}"
            with context.engine(commit, "stock" if name == "stock" else "final", key) as server:
                table = profile_engine(context, key, server, hardware)
            console.print(
                f"{name:24s} round {table.round_ms:6.1f} ms, bound {table.bound_ms:5.1f} ms, share {table.share_of_bound:4.0%}, "
                f"accepted length {table.accepted_length:.2f}"
            )
            for gap in table.rows[:6]:
                console.print(
                    f"    {gap.component:18s} {gap.measured_ms:7.2f} ms, bound {gap.bound_ms:6.2f} ms ({gap.limit})"
                )
            for warning in table.warnings:
                console.print(f"    {warning}")
        context.trees.prune_unknown(set())


if __name__ == "__main__":
    main()
