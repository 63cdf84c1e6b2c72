"""All that both targets compute between attentions, and the head: torch with cuBLAS and compiled glue against W12's fused kernels.

    PYTHONPATH=. python experiments/w12/layers.py OUT.json [--rows 1,2,4,8,16,32,64]

One layer is: attention's output + residual, norm, gate and up, SiLU, down + residual, norm, the next layer's inputs. Four layers
with weights of their own in a graph (1.4 GB and more in 12 bits), median, smallest and largest of nine replays. The library's
norms, residuals and SiLU are compiled and fused. `w12` is launched dependent. A pass is so many layers, and the head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from plain import add_and_norm, gaussian, greedy, normed, silu_times
from timing import time_launches
from torch import Tensor

from specpilot.kernels.w12.linear import W12GateUp, W12Head, W12Linear, from_linear

LAYERS = 4
TARGETS = {
    "Qwen3.8-27B": {"hidden": 5120, "inter": 17408, "q": 6144, "following": {16384: 48, 14336: 16}, "vocab": 248320},
    "Muse-Glimmer-30B": {"hidden": 6656, "inter": 19968, "q": 4096, "following": {8704: 52}, "vocab": 202048},
}
Calls = dict[str, list[Callable[[], object]]]


class Layer:
    """Weights of one layer in both forms."""

    def __init__(self, hidden: int, inter: int, q: int, following: int) -> None:
        self.out, self.gate_up, self.down = gaussian(hidden, q), gaussian(2 * inter, hidden), gaussian(hidden, inter)
        self.following, self.gains = gaussian(following, hidden), (1 + gaussian(hidden), 1 + gaussian(hidden))
        self.packed = [W12Linear(from_linear(w), dependent=True) for w in (self.out, self.down, self.following)]
        self.packed_gate_up = W12GateUp(*self.gate_up.chunk(2), dependent=True)

    def library(self, h: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """h [m, hidden] before, attended [m, q]: h after, and the next attention's inputs [m, following]."""
        h, x = add_and_norm(h, F.linear(attended, self.out), self.gains[0])
        h, x = add_and_norm(h, F.linear(silu_times(F.linear(x, self.gate_up)), self.down), self.gains[1])
        return h, F.linear(x, self.following)

    def w12(self, h: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The same by the kernels of this repository."""
        out, down, following = self.packed
        h = out(attended, residual=h)
        h = down(self.packed_gate_up(normed(h, self.gains[0])), residual=h)
        return h, following(normed(h, self.gains[1]))


def time_layer(sizes: dict[str, int], rows: list[int]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Microseconds of one layer by row count and manner."""
    layers = [Layer(**sizes) for _ in range(LAYERS)]
    found = {}
    for m in rows:
        h = torch.randn(m, sizes["hidden"], device="cuda").bfloat16()
        attended = torch.randn(m, sizes["q"], device="cuda").bfloat16()
        expected, ours = layers[0].library(h, attended), layers[0].w12(h, attended)
        for a, b in zip(ours, expected, strict=True):
            assert ((a.double() - b.double()).norm() / b.double().norm()).item() < 1e-2
        calls: Calls = {
            "library": [partial(layer.library, h, attended) for layer in layers],
            "w12": [partial(layer.w12, h, attended) for layer in layers],
        }
        found[str(m)] = {name: time_launches(these * 2) for name, these in calls.items()}
        print(sizes, f"m={m}", {name: round(t[0], 1) for name, t in found[str(m)].items()}, flush=True)
    return found


def time_head(vocab: int, hidden: int, rows: list[int]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Microseconds of the greedy token."""
    weight = gaussian(vocab, hidden)
    head = W12Head(from_linear(weight), dependent=True)
    found = {}
    for m in rows:
        x = torch.randn(m, hidden, device="cuda").bfloat16()
        out = torch.empty(m, dtype=torch.int64, device="cuda")
        plain = time_launches([partial(greedy, x, weight)] * 3)
        ours = time_launches([partial(head.argmax, x, out)] * 3)
        found[str(m)] = {"library": plain, "w12": ours}
    return found


def main() -> None:
    """Time, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    options = parser.parse_args()
    rows = [int(m) for m in options.rows.split(",")]
    record: dict[str, dict[str, object]] = {}
    for name, target in TARGETS.items():
        sizes = {part: target[part] for part in ("hidden", "inter", "q")}
        layers = {often: time_layer({**sizes, "following": n}, rows) for n, often in target["following"].items()}
        head = time_head(target["vocab"], target["hidden"], rows)
        passes = {}
        for m in map(str, rows):
            passes[m] = {
                way: sum(often * layer[m][way][0] for often, layer in layers.items()) / 1e3 + head[m][way][0] / 1e3
                for way in ("library", "w12")
            }
            ms = passes[m]
            print(
                name,
                f"m={m}",
                {way: round(t, 3) for way, t in ms.items()},
                f"x{ms['library'] / ms['w12']:.3f}",
                flush=True,
            )
        record[name] = {"layers_us": layers, "head_us": head, "passes_ms": passes}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "card": torch.cuda.get_device_name()}
    options.out.write_text(json.dumps({"versions": versions, "targets": record}, indent=1))


if __name__ == "__main__":
    main()
