"""Time of y = x W^T on the CPU: W12, BF16 in the same C++ kernel, BF16 in the seed mechanism's C++ kernel, and torch.

    python experiments/w12/cpu.py [--checkpoint FOLDER] [--rows 1 2 4 8 16] [--rounds 11]

Every contender has as many copies of the weight as make 320 MB of BF16, and goes through all of them in each round, so no
cache helps; rounds of the contenders are interleaved. Printed: the median over rounds, with the middle half of them, and
the ratio to W12 as the median of paired rounds. With --checkpoint, SmolLM2's own weights are used for its shapes;
otherwise, and for the large shape, Gaussian ones. The seed's kernel is taken from its patch and compiled.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from specpilot.kernels.w12.container import policy
from specpilot.kernels.w12.cpu import build
from specpilot.kernels.w12.cpu.linear import CpuLinear
from specpilot.kernels.w12.format import encode, exponent_counts

ROOT = Path(__file__).parents[2]
ROTATE_BYTES = 320 << 20
SHAPES = {  # N x K: name in a Llama checkpoint; the engine multiplies q, k, v and gate, up as one matrix
    (960, 576): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    (576, 576): ("self_attn.o_proj",),
    (3072, 576): ("mlp.gate_proj", "mlp.up_proj"),
    (576, 1536): ("mlp.down_proj",),
    (49152, 576): ("embed_tokens",),
    (5120, 5120): (),
}
SMOLLM2 = {(960, 576): 30, (576, 576): 30, (3072, 576): 30, (576, 1536): 30, (49152, 576): 1}  # calls of a pass
Call = Callable[[Tensor], object]


class Seed:
    """The BF16 kernel of memory/seeds/native-bf16-gemm, compiled from its patch."""

    def __init__(self) -> None:
        patch = ROOT / "memory/seeds/native-bf16-gemm/change.patch"
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["git", "init", "-q", folder], check=True)
            subprocess.run(["git", "apply", "--include=native/*", str(patch)], cwd=folder, check=True)
            words = ["g++", *build.FLAGS, "native/skinny_gemm.cpp", "-o", "seed.so"]
            subprocess.run(words, cwd=folder, check=True)
            self.lib = ctypes.CDLL(f"{folder}/seed.so")
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self.lib.slim_team.argtypes = [pointer, pointer, pointer, ctypes.c_int]
        self.lib.slim_arena.argtypes, self.lib.slim_arena.restype = [ctypes.c_size_t], pointer
        self.lib.slim_pack.argtypes = [pointer, ctypes.c_int, ctypes.c_int, pointer]
        self.lib.slim_gemm.argtypes = [pointer, ctypes.c_int, long, pointer, ctypes.c_int, ctypes.c_int, pointer, long]
        self.lib.slim_team(*build.openmp_entry_points(), torch.get_num_threads())

    def linear(self, weight: Tensor) -> Call:
        """A packed weight."""
        rows, columns = weight.shape
        address = self.lib.slim_arena(-(-rows // 16) * columns * 32)
        self.lib.slim_pack(weight.data_ptr(), rows, columns, address)

        def call(x: Tensor) -> Tensor:
            out = torch.empty(x.shape[0], rows)
            self.lib.slim_gemm(x.data_ptr(), x.shape[0], columns, address, rows, columns, out.data_ptr(), rows)
            return out

        return call


def weights_of(shape: tuple[int, int], checkpoint: Path | None) -> list[Tensor]:
    """Matrices of a shape: from the checkpoint, layer by layer, or Gaussian."""
    parts = SHAPES[shape]
    if not checkpoint or not parts:
        return [torch.randn(shape).mul_(0.02).bfloat16() for _ in range(2)]
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = [[name for name in file.keys() if part in name] for part in parts]
        order = [sorted(found, key=lambda name: [int(p) for p in name.split(".") if p.isdigit()]) for found in names]
        return [torch.cat([file.get_tensor(name) for name in layer]) for layer in zip(*order, strict=True)]


def contenders(weights: list[Tensor], seed: Seed) -> tuple[dict[str, list[Call]], float]:
    """Copies of each contender's weights, and the bits that W12 reads per weight."""
    shape = weights[0].shape
    copies = max(2, -(-ROTATE_BYTES // (2 * shape.numel())))
    chosen = [weights[i % len(weights)] for i in range(copies)]
    tight = []
    for weight in chosen:
        bases = policy.choose(exponent_counts(weight, policy.COUNTED_ROWS))
        tight.append(CpuLinear.from_planes(encode(weight, bases.row_block, base=bases.base)))
    found: dict[str, list[Call]] = {
        "W12": list(tight),
        "BF16, same kernel": [CpuLinear.from_bf16(weight) for weight in chosen],
        "BF16, seed kernel": [seed.linear(weight) for weight in chosen],
        "torch BF16": [torch_linear(weight.clone(), torch.bfloat16) for weight in chosen],
        "torch float32": [torch_linear(weight.float(), torch.float32) for weight in chosen[: copies // 2 + 1]],
    }
    return found, 8 * statistics.mean(layer.nbytes for layer in tight) / shape.numel()


def torch_linear(weight: Tensor, dtype: torch.dtype) -> Call:
    """torch's own product in that type."""
    return lambda x: F.linear(x.to(dtype), weight)


def measure(found: dict[str, list[Call]], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds per call of every round; torch BF16 above one row is slow beyond use, and gets two calls a round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, calls in found.items():
            some = calls[:2] if name == "torch BF16" and x.shape[0] > 1 else calls
            start = time.perf_counter()
            for call in some:
                call(x)
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - start) / len(some))
    return times


def main() -> None:
    """Print one table per shape, and the sum over a pass of SmolLM2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    torch.randn(64, 64) @ torch.randn(64, 64)  # loads torch's OpenMP runtime
    lib = build.library()
    print(
        f"{platform.machine()}, {given.threads} threads, torch {torch.__version__}, kernels {lib.w12_vector_bits()} bits wide\n"
    )
    seed = Seed()
    sums: dict[int, dict[str, float]] = {rows: {} for rows in given.rows}
    names: list[str] = []
    for shape in [(int(n), int(k)) for n, k in (text.split("x") for text in given.shapes)]:
        found, bits = contenders(weights_of(shape, given.checkpoint), seed)
        names = list(found)
        print(f"N x K = {shape[0]} x {shape[1]}, W12 at {bits:.2f} bits a weight; microseconds (middle half)\n")
        head(names)
        for rows in given.rows:
            times = measure(found, torch.randn(rows, shape[1]), given.rounds)
            print(line(rows, times, shape, bits), flush=True)
            for name in names:
                sums[rows][name] = sums[rows].get(name, 0) + SMOLLM2.get(shape, 0) * statistics.median(times[name])
        print()
    if all(f"{n}x{k}" in given.shapes for n, k in SMOLLM2):
        print("All matrices of a SmolLM2-135M pass, milliseconds (sum of medians)\n")
        head(names)
        for rows in given.rows:
            total = sums[rows]
            cells = [f"{1e3 * total[name]:.2f}" for name in names]
            ratios = [f"{total[name] / total['W12']:.2f}" for name in names[1:3]]
            print(f"| {rows} | " + " | ".join([*cells, *ratios, ""]) + " |")


def head(names: list[str]) -> None:
    """The table's head."""
    columns = ["rows", *names, "same kernel / W12", "seed / W12", "W12 reads"]
    print("| " + " | ".join(columns) + " |\n" + "|---:" * len(columns) + "|")


def line(rows: int, times: dict[str, list[float]], shape: tuple[int, int], bits: float) -> str:
    """A row of the table."""
    cells = []
    for values in times.values():
        low, middle, high = statistics.quantiles(values, n=4)
        cells.append(f"{1e6 * middle:.0f} ({1e6 * low:.0f}-{1e6 * high:.0f})")
    names = list(times)
    for name in names[1:3]:
        pairs = [other / own for other, own in zip(times[name], times["W12"], strict=True)]
        cells.append(f"{statistics.median(pairs):.2f}")
    speed = shape[0] * shape[1] * bits / 8 / statistics.median(times["W12"]) / 1e9
    return f"| {rows} | " + " | ".join([*cells, f"{speed:.1f} GB/s"]) + " |"


if __name__ == "__main__":
    main()
