"""Layers to swap in by name: a linear layer, gate-up-SiLU, and a head that never writes its logits.

Buffers are allocated once, so a forward pass with outputs given may be captured in a CUDA graph. Up to 64 rows the
fused kernel reads 12 bits a weight, up to 192 in groups of 64; above, the weight is expanded into a scratch matrix shared
by all layers of a device, and the library multiplies. Where the CUDA kernels cannot be had (another card, no nvcc) the
Triton product takes their place, with a warning that says why.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpilot.kernels.w12 import gemm
from specpilot.kernels.w12.autotune import choose
from specpilot.kernels.w12.errors import MachineProblem
from specpilot.kernels.w12.format import Planes, encode
from specpilot.kernels.w12.layout import COLUMNS, Tiles, tile_w12, untile

EXPAND_ABOVE = 192
"""Rows above which expanding and the library are faster than groups of 64; measured on an H200, experiments/w12."""
_scratch: dict[torch.device, Tensor] = {}


def scratch(device: torch.device, weights: int) -> Tensor:
    """The one BF16 scratch of a device, at least `weights` long. Grown outside of graph capture only."""
    held = _scratch.get(device)
    if held is None or held.numel() < weights:
        held = _scratch[device] = torch.empty(weights, dtype=torch.bfloat16, device=device)
    return held


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the CUDA kernels can be compiled and serve this device; warns once with the reason if not."""
    if device.type != "cuda":
        return False
    try:
        gemm.library_of(device)
    except MachineProblem as problem:
        warnings.warn(f"W12 falls back to Triton: {problem.message} ({problem.hint})", stacklevel=2)
        return False
    return True


class W12Weight(nn.Module):
    """A weight [N, K] in tiles, and the ways to multiply by it. `paired`: see `layout.Tiles`."""

    data: Tensor
    overflow: Tensor

    def __init__(self, tiles: Tiles) -> None:
        super().__init__()
        self.shape, self.paired = tiles.shape, tiles.paired
        self.register_buffer("data", tiles.data)
        self.register_buffer("overflow", tiles.overflow)

    @property
    def tiles(self) -> Tiles:
        """The tiles as they lie on the device now."""
        return Tiles("w12", self.shape, self.data, self.overflow, self.paired)

    def dense(self) -> Tensor:
        """The bfloat16 [N, K] weight, bit for bit; on CUDA it lies in the shared scratch and is valid until the next."""
        if not has_kernels(self.data.device):
            return untile(self.tiles)
        out = scratch(self.data.device, self.shape[0] * self.shape[1])[: self.shape[0] * self.shape[1]].view(self.shape)
        gemm.expand(self.tiles, out)
        return out

    def product(
        self, x: Tensor, out: Tensor, epilogue: int = gemm.STORE, *, residual: Tensor | None = None, dependent: bool
    ) -> Tensor:
        """x bfloat16 [m, K] into out: a fused launch for each 64 rows, so that a row's result does not depend on m."""
        if not has_kernels(x.device):
            return self._without_kernels(x, out, epilogue, residual)
        for start in range(0, x.shape[0], gemm.MAX_ROWS):
            rows = slice(start, start + gemm.MAX_ROWS)
            shape = choose(*self.shape, x[rows].shape[0], x.device, subtile=self.data.shape[2])
            added = residual[rows] if residual is not None else None
            gemm.launch(self.tiles, x[rows], out[rows], shape, epilogue, residual=added, dependent=dependent)
        return out

    def _without_kernels(self, x: Tensor, out: Tensor, epilogue: int, residual: Tensor | None) -> Tensor:
        if epilogue == gemm.SILU:
            gate, up = F.linear(x, self.dense()).chunk(2, dim=-1)
            return out.copy_(F.silu(gate) * up)
        from specpilot.kernels.w12.triton_gemm import matmul  # only here: Triton may be absent where it is not needed

        y = matmul(self.tiles, x)
        return out.copy_(y if residual is None else y + residual)


def from_linear(weight: Tensor, *, paired: bool = False, row_block: int | None = None) -> W12Weight:
    """Encode a bfloat16 [N, K] (K a multiple of 64) into tiles on its own device."""
    return W12Weight(tile_w12(encode(weight, row_block), paired=paired))


class W12Linear(nn.Module):
    """y = x W^T (+ bias) (+ residual), bit-identical to the twin kernel on the BF16 weight."""

    bias: Tensor | None

    def __init__(self, weight: W12Weight, bias: Tensor | None = None, *, dependent: bool = False) -> None:
        super().__init__()
        self.weight, self.dependent = weight, dependent
        self.register_buffer("bias", bias)

    @classmethod
    def from_dense(cls, linear: nn.Linear, *, row_block: int | None = None, dependent: bool = False) -> W12Linear:
        """From a bfloat16 nn.Linear. dependent: every kernel before it in the stream must be safe to overlap."""
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(from_linear(linear.weight.detach(), row_block=row_block), bias, dependent=dependent)

    @classmethod
    def from_planes(cls, planes: Planes, *, dependent: bool = False) -> W12Linear:
        """From the logical planes of a packed checkpoint."""
        return cls(W12Weight(tile_w12(planes)), dependent=dependent)

    def forward(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x: bfloat16 [..., K]; residual and out: [..., N]."""
        n, k = self.weight.shape
        rows = x.reshape(-1, k)
        if not x.is_cuda or rows.shape[0] > EXPAND_ABOVE:
            y = F.linear(x, self.weight.dense(), self.bias)
            y = y if residual is None else y + residual
            return y if out is None else out.copy_(y)
        y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device) if out is None else out
        fused = residual.reshape(-1, n) if residual is not None and self.bias is None else None
        if rows.shape[0]:
            self.weight.product(rows, y.view(-1, n), residual=fused, dependent=self.dependent)
        if self.bias is not None:
            y += self.bias
            if residual is not None:
                y += residual
        return y


class W12GateUp(nn.Module):
    """silu(x G^T) * (x U^T) in one launch; both products and the SiLU rounded to BF16, as separate operations would."""

    def __init__(self, gate: Tensor, up: Tensor, *, dependent: bool = False) -> None:
        super().__init__()
        if gate.shape != up.shape:
            raise ValueError(f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
        self.weight, self.dependent = from_linear(torch.cat([gate, up]), paired=True), dependent

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: bfloat16 [..., K]; returns [..., N / 2]."""
        n, k = self.weight.shape
        rows = x.reshape(-1, k)
        if not x.is_cuda or rows.shape[0] > EXPAND_ABOVE:
            gate, up = F.linear(x, self.weight.dense()).chunk(2, dim=-1)
            y = F.silu(gate) * up
            return y if out is None else out.copy_(y)
        y = torch.empty(*x.shape[:-1], n // 2, dtype=x.dtype, device=x.device) if out is None else out
        if rows.shape[0]:
            self.weight.product(rows, y.view(-1, n // 2), gemm.SILU, dependent=self.dependent)
        return y


class W12Head(nn.Module):
    """A language-model head. Equal logits (after rounding to BF16) resolve to the lowest token, as torch.argmax does."""

    best_value: Tensor
    best_index: Tensor

    def __init__(self, weight: W12Weight, *, dependent: bool = False) -> None:
        super().__init__()
        self.weight, self.dependent = weight, dependent
        blocks = (
            torch.cuda.get_device_properties(weight.data.device).multi_processor_count if weight.data.is_cuda else 0
        )
        size = 2 * blocks * gemm.MAX_ROWS * gemm.TOP
        self.register_buffer("best_value", torch.empty(size, device=weight.data.device), persistent=False)
        self.register_buffer(
            "best_index", torch.empty(size, dtype=torch.int32, device=weight.data.device), persistent=False
        )

    def logits(self, x: Tensor) -> Tensor:
        """bfloat16 [..., N], written out."""
        return W12Linear(self.weight, dependent=self.dependent)(x)

    def argmax(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """int64 [m] of bfloat16 x [m, K]."""
        index = out.view(-1, 1) if out is not None else torch.empty(x.shape[0], 1, dtype=torch.int64, device=x.device)
        return self._best(x, 1, index, None).view(-1)

    def top(self, x: Tensor, k: int = gemm.TOP) -> tuple[Tensor, Tensor]:
        """The k <= 16 best: float32 [m, k] and int64 [m, k], best first."""
        if not 1 <= k <= gemm.TOP:
            raise ValueError(f"k must be 1..{gemm.TOP}, got {k}")
        value = torch.empty(x.shape[0], k, device=x.device)
        index = torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device)
        return value, self._best(x, k, index, value)

    def _best(self, x: Tensor, k: int, index: Tensor, value: Tensor | None) -> Tensor:
        for start in range(0, x.shape[0], gemm.MAX_ROWS):
            rows = slice(start, start + gemm.MAX_ROWS)
            self._best_rows(x[rows], k, index[rows], value[rows] if value is not None else None)
        return index

    def _best_rows(self, x: Tensor, k: int, index: Tensor, value: Tensor | None) -> None:
        if not has_kernels(x.device):
            found = F.linear(x, self.weight.dense()).float().sort(dim=-1, descending=True, stable=True)
            index.copy_(found.indices[:, :k])
            if value is not None:
                value.copy_(found.values[:, :k])
            return
        shape = choose(*self.weight.shape, x.shape[0], x.device, subtile=self.weight.data.shape[2], best=True)
        best = (self.best_value, self.best_index)
        blocks = gemm.launch(
            self.weight.tiles,
            x,
            None,
            shape,
            gemm.BEST,
            best=best,
            top=k,
            dependent=self.dependent,
        )
        gemm.finish_best(best, blocks, value, index, dependent=self.dependent)


def swap(model: nn.Module, wanted: Callable[[str], bool], *, dependent: bool = False) -> list[str]:
    """Replace every bias-free or biased bfloat16 nn.Linear whose dotted name is `wanted`; the names replaced.

    Layers whose second dimension is not a multiple of 64 are left alone. Frees each BF16 weight as it goes.
    """
    replaced = []
    for name, module in list(model.named_modules()):
        fits = isinstance(module, nn.Linear) and module.weight.dtype == torch.bfloat16
        if not (fits and wanted(name) and module.in_features % COLUMNS == 0):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], W12Linear.from_dense(module, dependent=dependent))
        replaced.append(name)
    return replaced
