"""THE place where weight matrices are multiplied. Everything else asks `make_linear` for a Linear and calls it.

float32: float32 activations, the BF16-valued weights widened once and packed by oneDNN (faster than a plain float32 GEMM at every row count
on AVX2). bfloat16: the torch BF16 GEMM, which without AVX-512 is fast at exactly one row; more rows take the float32 path.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch.nn import functional as F

Compute = Literal["float32", "bfloat16"]


class Linear(Protocol):
    """y = x W^T. x [M, K] float32 or bfloat16, y [M, N] (float32, or bfloat16 where the implementation computes in it)."""

    name: str
    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PackedLinear:
    """float32 weights in oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor, name: str, pack_rows: int) -> None:
        self.name = name
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.float(), pack_rows)
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x.float(), self._weight, None, "none", [], "")


class PlainLinear:
    """float32 weights as they are: for a torch without oneDNN, and for shapes that oneDNN does not pack."""

    def __init__(self, weight: torch.Tensor, name: str) -> None:
        self.name = name
        self.out_features, self.in_features = weight.shape
        self._weight = weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self._weight)


class Bfloat16Linear:
    """BF16 at one row, float32 beyond. Holds both weights."""

    def __init__(self, weight: torch.Tensor, many_rows: Linear) -> None:
        self.name = many_rows.name
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()
        self._many_rows = many_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return F.linear(x.to(torch.bfloat16), self._weight)
        return self._many_rows(x)


def make_linear(weight: torch.Tensor, name: str, compute: Compute, pack_rows: int = 8) -> Linear:
    """A Linear for `weight` [N, K] BF16.

    name: which weight it is, for counters and errors. pack_rows: row count that oneDNN lays the weight out for; any count may be called.
    """
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"{name}: make_linear takes BF16 weights, got {weight.dtype}")
    wide: Linear = (
        PackedLinear(weight, name, pack_rows) if torch.backends.mkldnn.is_available() else PlainLinear(weight, name)
    )
    return Bfloat16Linear(weight, wide) if compute == "bfloat16" else wide
