"""What comparisons of layers and of whole steps share: random weights, what torch compiles between products, and our norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.kernels.w12 import gemm

EPS = 1e-6


@torch.compile(dynamic=False)
def silu_times(both: Tensor) -> Tensor:
    """[m, 2 I] to [m, I]."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.compile(dynamic=False)
def add_and_norm(h: Tensor, more: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """h + more, and its norm."""
    total = h + more
    return total, F.rms_norm(total, (total.shape[-1],), gain, EPS)


def gaussian(*shape: int) -> Tensor:
    """A weight as models have them."""
    return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()


def greedy(x: Tensor, head: Tensor) -> Tensor:
    """The library's greedy token."""
    return F.linear(x, head).argmax(-1)


def normed(h: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm by our kernel, launched dependent."""
    y = torch.empty_like(h)
    gemm.add_norm(h, gain, y, eps=EPS, dependent=True)
    return y
