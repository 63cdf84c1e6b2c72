"""Choose launch shapes for matrices on the card at hand, by default both targets'; adds them to kernels/w12/tuned/CARD.json.

PYTHONPATH=. python experiments/w12/tune.py [OUT.json] [--shapes 6144x4096,24576x4096,...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from models import matrices
from timing import rotate, time_launches

from specpilot.kernels.w12 import autotune, gemm
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.layout import tile_w12


def tune_matrix(n: int, k: int, processors: int) -> dict[str, dict[str, int]]:
    """The table entry of one shape, on Gaussian weights."""
    tiles = tile_w12(encode((torch.randn(n, k, device="cuda") * 0.02).bfloat16()))
    weights = rotate(tiles)[: max(2, min(12, 1_400_000_000 // tiles.nbytes + 1))]
    x = torch.randn(64, k, device="cuda").bfloat16()
    y = torch.empty(64, n, dtype=torch.bfloat16, device="cuda")
    best: dict[int, float] = {}

    def measure(shape: gemm.Shape, m: int) -> float:
        try:
            took = time_launches([lambda t=t: gemm.launch(t, x[:m], y[:m], shape, dependent=True) for t in weights], 5)[
                0
            ]
        except (ValueError, RuntimeError):
            return float("inf")
        best[m] = min(best.get(m, took), took)
        return took

    entry = autotune.tune(n, k, measure, processors)
    print(f"{n}x{k}", {m: round(t, 1) for m, t in best.items()}, list(entry.values())[:2], flush=True)
    return entry


def main() -> None:
    """Tune every matrix, largest last; write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=autotune.TUNED / f"{autotune.card_name()}.json")
    parser.add_argument("--shapes", help="N x K of other matrices, by commas")
    options = parser.parse_args()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = (
        [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")] if options.shapes else matrices()
    )
    found = json.loads(options.out.read_text())["shapes"] if options.out.exists() else {}
    for n, k in wanted:
        started = time.time()
        found[f"{n}x{k}"] = tune_matrix(n, k, processors)
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps({"card": torch.cuda.get_device_name(), "shapes": found}, indent=1))
        print(f"  {time.time() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
