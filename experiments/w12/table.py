"""Print the tables of README.md from a recorded result; of each matrix at a few row counts only.

python experiments/w12/table.py results/h200_bench.json [1,16,32,64]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Sums over one pass, then every matrix."""
    found = json.loads(Path(sys.argv[1]).read_text())
    wanted = sys.argv[2].split(",") if len(sys.argv) > 2 else ["1", "16", "32", "64"]
    for model, by_rows in found["passes_ms"].items():
        print(f"\n{model}, ms a pass\n\n| rows | library BF16 | twin BF16 | W12 | ratio | W12, not dependent | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for m, t in by_rows.items():
            plain = t["library"] / t["w12_plain"]
            cells = [
                m,
                f"{t['library']:.2f}",
                f"{t['twin']:.2f}",
                f"{t['w12']:.2f}",
                f"**{t['library'] / t['w12']:.3f}**",
            ]
            print("| " + " | ".join([*cells, f"{t['w12_plain']:.2f}", f"{plain:.3f}"]) + " |")
    print("\n| N x K | rows | library us | TB/s | twin us | W12 us (least–most) | TB/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, matrix in found["matrices"].items():
        for m, t in ((m, t) for m, t in matrix["us"].items() if m in wanted):
            (library, *_), (twin, *_), (w12, least, most) = t["library"], t["twin"], t["w12"]
            rate = {kind: matrix["bytes"][kind] / t[kind][0] / 1e6 for kind in ("library", "w12")}
            print(
                f"| {name} | {m} | {library:.1f} | {rate['library']:.2f} | {twin:.1f} | {w12:.1f} ({least:.1f}–{most:.1f})"
                f" | {rate['w12']:.2f} | {library / w12:.3f} |"
            )


if __name__ == "__main__":
    main()
