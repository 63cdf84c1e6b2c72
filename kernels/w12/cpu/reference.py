"""What the CPU kernels compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import Planes, decode


def linear(x: Tensor, planes: Planes) -> Tensor:
    """x [M, K] times the decoded weights, in float64: [M, N]. The value that a float32 sum approximates."""
    return x.double() @ decode(planes).double().t()


def linear_in_order(x: Tensor, planes: Planes) -> Tensor:
    """The kernel's own order: float32 sums over k = 0, 1, .., each product and sum rounded once (fused).

    A float64 product of a float32 and a bfloat16 is exact, and rounding the float64 sum to float32 equals the fused
    operation except where the float64 sum itself is rounded onto a tie of float32 (about one step in 2^29).
    x: [M, K] -> float32 [M, N].
    """
    weight = decode(planes).double()
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    for k in range(weight.shape[1]):
        total = (total.double() + x[:, k : k + 1].double() * weight[:, k]).float()
    return total
