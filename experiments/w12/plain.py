"""What lies between the products of a decoder, as torch compiles it: the library's side of a comparison."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
