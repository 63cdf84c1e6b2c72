"""Time every matrix of both targets: library BF16, our kernel on BF16, our kernel on 12 bits; sum over one pass.

    PYTHONPATH=. python experiments/w12/bench.py OUT.json [--rows 1,2,4,8,16,32,64]

Gaussian weights (about 0.015 % escapes), never zeros; at least 1.4 GB of weights in rotation; CUDA-graph replay; median,
smallest and largest of nine replays. `w12` is launched dependent (weights may stream while the previous kernel ends),
as an engine on our kernels would; `w12_plain` is not. The library's matrices are fused like ours.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from models import MODELS, matrices
from timing import copies, rotate, time_launches

from specpilot.kernels.w12 import autotune, gemm
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.layout import tile_bf16, tile_w12

Times = dict[str, dict[str, tuple[float, float, float]]]


def time_matrix(n: int, k: int, row_counts: list[int]) -> dict[str, object]:
    """All variants of one matrix, with the bytes that each reads."""
    weight = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
    planes = encode(weight)
    packed, twin = rotate(tile_w12(planes)), tile_bf16(weight)
    dense = [weight, *(weight.clone() for _ in range(copies(2 * n * k) - 1))]
    twins = rotate(twin)
    times: Times = {}
    for m in row_counts:
        x = torch.randn(m, k, device="cuda").bfloat16()
        y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        shape = autotune.choose(n, k, m)
        wide = autotune.choose(n, k, m, subtile=twin.data.shape[2])
        ours = partial(gemm.launch, x=x, y=y)
        launches = {
            "library": [partial(F.linear, x, w) for w in dense],
            "twin": [partial(ours, t, shape=wide, dependent=True) for t in twins],
            "w12": [partial(ours, t, shape=shape, dependent=True) for t in packed],
            "w12_plain": [partial(ours, t, shape=shape) for t in packed],
        }
        times[str(m)] = {name: time_launches(calls) for name, calls in launches.items()}
        row = times[str(m)]
        print(
            f"{n}x{k} m={m}",
            {name: round(t[0], 1) for name, t in row.items()},
            f"x{row['library'][0] / row['w12'][0]:.3f}",
            f"{packed[0].nbytes / row['w12'][0] / 1e6:.2f} TB/s",
            flush=True,
        )
    return {
        "n": n,
        "k": k,
        "escape_rate": planes.escape_rate,
        "bytes": {"library": 2 * n * k, "twin": twin.nbytes, "w12": packed[0].nbytes, "w12_plain": packed[0].nbytes},
        "us": times,
    }


def sum_pass(model: str, found: dict[str, dict[str, object]], m: str) -> dict[str, float]:
    """Milliseconds of one pass through all matrices of a model, per variant."""
    sums: dict[str, float] = {}
    for _, n, k, often, _ in MODELS[model]:
        for name, took in found[f"{n}x{k}"]["us"][m].items():  # type: ignore[index]
            sums[name] = sums.get(name, 0.0) + often * took[0] / 1e3
    return sums


def main() -> None:
    """Time, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    options = parser.parse_args()
    row_counts = [int(m) for m in options.rows.split(",")]
    found: dict[str, dict[str, object]] = {}
    for n, k in matrices():
        found[f"{n}x{k}"] = time_matrix(n, k, row_counts)
        torch.cuda.empty_cache()
    passes = {model: {str(m): sum_pass(model, found, str(m)) for m in row_counts} for model in MODELS}
    for model, by_rows in passes.items():
        for m, sums in by_rows.items():
            ratio = sums["library"] / sums["w12"]
            print(model, f"m={m}", {name: round(t, 3) for name, t in sums.items()}, f"x{ratio:.3f}")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "card": torch.cuda.get_device_name()}
    options.out.write_text(json.dumps({"versions": versions, "matrices": found, "passes_ms": passes}, indent=1))


if __name__ == "__main__":
    main()
