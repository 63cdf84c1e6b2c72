"""Fused variants against the separate operations, and the row count above which expanding pays.

PYTHONPATH=. python experiments/w12/variants.py OUT.json
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import copies, rotate, time_launches
from torch import Tensor

from specpilot.kernels.w12 import autotune, gemm
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.layout import Tiles, tile_w12
from specpilot.kernels.w12.linear import W12Head, W12Weight
from specpilot.kernels.w12.triton_gemm import matmul

Times = dict[str, dict[str, float]]


def gaussian(n: int, k: int) -> Tensor:
    """A weight as models have them."""
    return (torch.randn(n, k, device="cuda") * 0.02).bfloat16()


def gate_up(n: int, k: int) -> Times:
    """silu(gate) * up: library and two elementwise kernels, ours and two elementwise kernels, fused."""
    weight = gaussian(n, k)
    planes = encode(weight)
    dense = [weight, *(weight.clone() for _ in range(copies(2 * n * k) - 1))]
    plain, paired = rotate(tile_w12(planes)), rotate(tile_w12(planes, paired=True))
    found: Times = {}
    for m in (1, 16, 32):
        x, shape = torch.randn(m, k, device="cuda").bfloat16(), autotune.choose(n, k, m)
        y, out = (
            torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
            torch.empty(m, n // 2, device="cuda").bfloat16(),
        )

        def library(w: Tensor, x: Tensor = x) -> Tensor:
            gate, up = F.linear(x, w).chunk(2, dim=-1)
            return F.silu(gate) * up

        def separate(t: Tiles, x: Tensor = x, y: Tensor = y, shape: gemm.Shape = shape) -> Tensor:
            gemm.launch(t, x, y, shape)
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate) * up

        fused = partial(gemm.launch, x=x, y=out, shape=shape, epilogue=gemm.SILU, dependent=True)
        found[str(m)] = {
            "library": time_launches([partial(library, w) for w in dense])[0],
            "separate": time_launches([partial(separate, t) for t in plain])[0],
            "fused": time_launches([partial(fused, t) for t in paired])[0],
        }
    return found


def head(n: int, k: int) -> Times:
    """Greedy token and top 16: library with logits written out, fused."""
    weight = gaussian(n, k)
    heads = [W12Head(W12Weight(t), dependent=True) for t in rotate(tile_w12(encode(weight)))]
    dense = [weight, weight.clone()]
    found: Times = {}
    for m in (1, 8, 16, 64):
        x = torch.randn(m, k, device="cuda").bfloat16()
        found[str(m)] = {
            "library argmax": time_launches([partial(lambda w, x: F.linear(x, w).argmax(-1), w, x) for w in dense])[0],
            "library top 16": time_launches([partial(lambda w, x: F.linear(x, w).topk(16), w, x) for w in dense])[0],
            "fused argmax": time_launches([partial(h.argmax, x) for h in heads])[0],
            "fused top 16": time_launches([partial(h.top, x, 16) for h in heads])[0],
        }
    return found


def norm_then_product(n: int, k: int) -> Times:
    """Residual add, RMSNorm, product: alone, one after the other, and with weights streaming during the norm."""
    tiles = rotate(tile_w12(encode(gaussian(n, k))))
    found: Times = {}
    for m in (1, 16):
        x, residual, gain = (torch.randn(r, k, device="cuda").bfloat16() for r in (m, m, 1))
        total, normed = torch.empty_like(x), torch.empty_like(x)
        y, shape = torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), autotune.choose(n, k, m)
        norm = partial(gemm.add_norm, x, gain[0], normed, residual=residual, total=total)

        def both(
            t: Tiles,
            dependent: bool,
            normed: Tensor = normed,
            y: Tensor = y,
            shape: gemm.Shape = shape,
            norm: partial[None] = norm,
        ) -> None:
            norm(dependent=dependent)
            gemm.launch(t, normed, y, shape, dependent=dependent)

        found[str(m)] = {
            "product alone": time_launches([partial(gemm.launch, t, normed, y, shape) for t in tiles])[0],
            "norm alone": time_launches([norm] * 20)[0],
            "both": time_launches([partial(both, t, False) for t in tiles])[0],
            "both, dependent": time_launches([partial(both, t, True) for t in tiles])[0],
        }
    return found


def crossover(n: int, k: int) -> Times:
    """Many rows: the fused kernel in groups of 64, expanding and the library, the library on BF16."""
    weight = gaussian(n, k)
    dense = [weight, *(weight.clone() for _ in range(copies(2 * n * k) - 1))]
    tiles, buffer = rotate(tile_w12(encode(weight))), torch.empty_like(weight)
    found: Times = {}
    for m in (64, 128, 192, 256, 384, 512, 1024):
        x = torch.randn(m, k, device="cuda").bfloat16()
        y, shape = torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), autotune.choose(n, k, 64)

        def groups(t: Tiles, x: Tensor = x, y: Tensor = y, shape: gemm.Shape = shape) -> None:
            for a, b in zip(x.split(64), y.split(64), strict=True):
                gemm.launch(t, a, b, shape, dependent=True)

        def expanded(t: Tiles, x: Tensor = x) -> Tensor:
            gemm.expand(t, buffer)
            return F.linear(x, buffer)

        found[str(m)] = {
            "library": time_launches([partial(F.linear, x, w) for w in dense], 5)[0],
            "groups of 64": time_launches([partial(groups, t) for t in tiles], 5)[0],
            "expand + library": time_launches([partial(expanded, t) for t in tiles], 5)[0],
        }
    return found


def triton_product(n: int, k: int) -> Times:
    """The Triton kernel, CUDA's, the library. Without dependent launch, which Triton does not do."""
    tiles = rotate(tile_w12(encode(gaussian(n, k))))
    dense = [gaussian(n, k) for _ in range(copies(2 * n * k))]
    found: Times = {}
    for m in (1, 8, 16, 64):
        x, y = torch.randn(m, k, device="cuda").bfloat16(), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        shape = autotune.choose(n, k, m)
        found[str(m)] = {
            "library": time_launches([partial(F.linear, x, w) for w in dense])[0],
            "Triton": time_launches([partial(matmul, t, x) for t in tiles])[0],
            "CUDA": time_launches([partial(gemm.launch, t, x, y, shape) for t in tiles])[0],
        }
    return found


def main() -> None:
    """Time, print, record (microseconds)."""
    found = {
        "gate+up+silu 34816x5120": gate_up(34816, 5120),
        "norm + product 16384x5120": norm_then_product(16384, 5120),
        "crossover 34816x5120": crossover(34816, 5120),
        "crossover 5120x6144": crossover(5120, 6144),
        "head 248320x5120": head(248320, 5120),
        "Triton 34816x5120": triton_product(34816, 5120),
        "Triton 5120x17408": triton_product(5120, 17408),
    }
    for name, by_rows in found.items():
        for m, times in by_rows.items():
            print(name, f"m={m}", {what: round(t, 1) for what, t in times.items()}, flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
