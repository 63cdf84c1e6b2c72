"""How many weights escape the fifteen exponents: synthetic matrices of several kinds, and a real checkpoint.

    python experiments/w12/escape_rates.py [--checkpoint FOLDER]

For each matrix: the share of weights outside the window with one base for the tensor, and with one per 128 and per 64
rows; bits per weight with the policy that `specpilot pack` uses; the share of *units* of 16 rows x 4 columns with an
escape in them (the CPU kernel stores those as BF16); and the entropy of the exponent, the floor of any lossless code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specpilot.kernels.w12.container import policy
from specpilot.kernels.w12.format import encode, exponent_counts

SHAPE = (4096, 5120)
SIGMA = 0.02


def synthetic() -> Iterator[tuple[str, Tensor]]:
    """Matrices of 4096 x 5120, standard deviation 0.02 where there is one."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    yield "Gaussian", normal(*SHAPE) * SIGMA
    uniform = torch.rand(SHAPE, generator=random) - 0.5
    yield "Laplace", -uniform.sign() * torch.log1p(-2 * uniform.abs()) * (SIGMA / 2**0.5)
    chi = sum(normal(*SHAPE) ** 2 for _ in range(5))
    yield "Student-t(5)", normal(*SHAPE) / (chi / 5).sqrt() * (SIGMA / (5 / 3) ** 0.5)
    yield "Gaussian, rows scaled by exp(N(0, 1))", normal(*SHAPE) * SIGMA * normal(SHAPE[0], 1).exp()
    padded = normal(*SHAPE) * SIGMA
    padded[-512:] = 0
    yield "Gaussian, the last 512 rows zero", padded
    scattered = normal(*SHAPE) * SIGMA
    yield "Gaussian, 1 % zeros", scattered.masked_fill_(torch.rand(SHAPE, generator=random) < 0.01, 0)


def row_of(name: str, weight: Tensor) -> str:
    """A line of the table."""
    weight = weight.bfloat16()
    total = weight.numel()
    counts = exponent_counts(weight, policy.COUNTED_ROWS)
    rates = [policy.choose(counts, block).escapes / total for block in ("none", "128", "64")]
    bases = policy.choose(counts)
    planes = encode(weight, bases.row_block, base=bases.base)
    stored = f"{planes.bits_per_weight:.3f}" if planes.escape_rate <= policy.MAX_ESCAPE_RATE else "16 (BF16)"
    share = counts.sum(0).double() / total
    entropy = float(-(share * share.clamp(min=1e-300).log2()).sum())
    shown = " | ".join(f"{100 * rate:.4f}" for rate in rates)
    return f"| {name} | {shown} | {bases.row_block or 'all'} | {stored} | {100 * units(planes.codes):.2f} | {entropy:.2f} |"


def units(codes: Tensor) -> float:
    """Share of whole units of 16 rows x 4 columns with an escape."""
    rows, columns = codes.shape[0] // 16 * 16, codes.shape[1] // 4 * 4
    blocks = (codes[:rows, :columns] == 0).view(rows // 16, 16, columns // 4, 4)
    return float(blocks.any(3).any(1).double().mean())


def checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """BF16 matrices of a checkpoint, same layers joined: `layers.*.mlp.up_proj.weight`."""
    groups: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if tensor.dtype == torch.bfloat16 and tensor.dim() == 2:
                    joined = ".".join("*" if part.isdigit() else part for part in name.split("."))
                    groups.setdefault(joined, []).append(tensor)
    for name, tensors in groups.items():
        yield f"`{name}` ({len(tensors)})", torch.cat(tensors)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(2)
    columns = (
        "matrix",
        "escapes %, one base",
        "per 128 rows",
        "per 64 rows",
        "rows per base",
        "bits/weight",
        "units with escapes %",
        "entropy, bits",
    )
    print("| " + " | ".join(columns) + " |")
    print("|---" + "|---:" * (len(columns) - 1) + "|")
    for name, weight in synthetic():
        print(row_of(name, weight), flush=True)
    if given.checkpoint:
        for name, weight in checkpoint(given.checkpoint):
            print(row_of(name, weight), flush=True)


if __name__ == "__main__":
    main()
