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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpilot.kernels.w12 import gemm
from specpilot.kernels.w12.autotune import choose
from specpilot.kernels.w12.errors import BadRequest, MachineProblem
from specpilot.kernels.w12.format import Planes, encode
from specpilot.kernels.w12.layout import COLUMNS, Tiles, tile_w12, untile

EXPAND_ABOVE = 192
"""Rows above which expanding and the library are faster than groups of 64; measured on an H200, experiments/w12."""
_scratch: dict[torch.device, list[Tensor]] = {}


def scratch(device: torch.device, weights: int) -> Tensor:
    """The one BF16 scratch of a device, at least `weights` long.

    A scratch that was outgrown stays: a CUDA graph captured with it writes there at every replay. Ask for the largest
    first. Raises RuntimeError where it would have to grow while a graph is being captured.
    """
    held = _scratch.setdefault(device, [])
    if not held or held[-1].numel() < weights:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the W12 scratch of {device} must grow to {weights} weights, which a graph capture does not allow: "
                f"run the layers once with more than {EXPAND_ABOVE} rows, or call linear.scratch, before capturing"
            )
        held.append(torch.empty(weights, dtype=torch.bfloat16, device=device))
    return held[-1]


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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Other weights of this shape may have longer records and more patches."""
        data, overflow = (state_dict.get(prefix + name) for name in ("data", "overflow"))
        if data is not None and overflow is not None and data.shape[:2] == self.data.shape[:2]:
            self.data, self.overflow = self.data.new_empty(data.shape), self.overflow.new_empty(overflow.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)

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
        self,
        x: Tensor,
        out: Tensor | None = None,
        epilogue: int = gemm.STORE,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        dependent: bool = False,
    ) -> Tensor:
        """What the layers below compute, x bfloat16 [..., K] into [..., N] (SILU: [..., N / 2]), by the way that is fastest.

        Fused launches of up to 64 rows, so that a row's result does not depend on their number; above `EXPAND_ABOVE`
        rows, and on a CPU, the expanded weight and the library. `out` may be `residual`. Raises ValueError for a wrong
        shape.
        """
        n, k = self.shape[0] // (2 if epilogue == gemm.SILU else 1), self.shape[1]
        if x.dim() < 1 or x.shape[-1] != k:
            raise ValueError(f"x must be [..., {k}] for a weight of {list(self.shape)}, got {list(x.shape)}")
        shape = (*x.shape[:-1], n)
        for name, given in (("out", out), ("residual", residual)):
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)} for x of {list(x.shape)}, got {list(given.shape)}")
        rows = x.reshape(-1, k)
        if not x.is_cuda or rows.shape[0] > EXPAND_ABOVE:
            y = self._expanded(x, epilogue, bias, residual)
            return y if out is None else out.copy_(y)
        y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        last = residual if bias is not None else None  # added after the bias, as separate operations would
        sums = y if last is None else torch.empty_like(y)  # `out` may be `residual`, which is needed until the end
        fused = residual.reshape(-1, n) if residual is not None and last is None else None
        if rows.shape[0]:
            self._launch(rows, sums.view(-1, n), epilogue, fused, dependent)
        if bias is not None:
            sums += bias
        return sums if last is None else torch.add(sums, last, out=y)

    def _expanded(self, x: Tensor, epilogue: int, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = F.linear(x, self.dense(), bias)
        if epilogue == gemm.SILU:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y if residual is None else y + residual

    def _launch(self, x: Tensor, y: Tensor, epilogue: int, residual: Tensor | None, dependent: bool) -> None:
        """x [m, K] into y by kernels that read the tiles."""
        if not has_kernels(x.device):
            self._without_kernels(x, y, epilogue, residual)
            return
        for start in range(0, x.shape[0], gemm.MAX_ROWS):
            rows = slice(start, start + gemm.MAX_ROWS)
            shape = choose(*self.shape, x[rows].shape[0], x.device, subtile=self.data.shape[2])
            added = residual[rows] if residual is not None else None
            gemm.launch(self.tiles, x[rows], y[rows], shape, epilogue, residual=added, dependent=dependent)

    def _without_kernels(self, x: Tensor, y: Tensor, epilogue: int, residual: Tensor | None) -> None:
        if epilogue == gemm.SILU:
            y.copy_(self._expanded(x, epilogue, None, None))
            return
        from specpilot.kernels.w12.triton_gemm import matmul  # only here: Triton may be absent where it is not needed

        product = matmul(self.tiles, x)
        y.copy_(product if residual is None else product + residual)


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
        return self.weight.product(x, out, bias=self.bias, residual=residual, dependent=self.dependent)


class W12GateUp(nn.Module):
    """silu(x G^T) * (x U^T) in one launch; both products and the SiLU rounded to BF16, as separate operations would."""

    def __init__(self, gate: Tensor, up: Tensor, *, dependent: bool = False) -> None:
        super().__init__()
        if gate.shape != up.shape:
            raise ValueError(f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
        self.weight, self.dependent = from_linear(torch.cat([gate, up]), paired=True), dependent

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: bfloat16 [..., K]; returns [..., N / 2]."""
        return self.weight.product(x, out, gemm.SILU, dependent=self.dependent)


class W12Head(nn.Module):
    """A language-model head. Equal logits (after rounding to BF16) resolve to the lowest token, as torch.argmax does; NaN is above all."""

    def __init__(self, weight: W12Weight, *, dependent: bool = False) -> None:
        super().__init__()
        self.weight, self.dependent = weight, dependent
        # No buffers: a cast of the model would shorten them under the kernel, and a move leave them behind.
        self._held: tuple[Tensor, Tensor] | None = None
        if weight.data.is_cuda:
            self._lists(weight.data.device)

    def _lists(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for the best logits of every thread block. Grown by the first call after a move; capture after that."""
        if self._held is None or self._held[0].device != device:
            blocks = torch.cuda.get_device_properties(device).multi_processor_count
            value = torch.empty(2 * blocks * gemm.MAX_ROWS * gemm.TOP, device=device)
            self._held = value, torch.empty_like(value, dtype=torch.int32)
        return self._held

    def logits(self, x: Tensor) -> Tensor:
        """bfloat16 [..., N], written out."""
        return W12Linear(self.weight, dependent=self.dependent)(x)

    def argmax(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """int64 [m] of bfloat16 x [m, K]."""
        self._check(x)
        if out is None:
            out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        elif (out.dtype, tuple(out.shape), out.device) != (
            torch.int64,
            x.shape[:1],
            x.device,
        ) or not out.is_contiguous():
            raise ValueError(
                f"out must be contiguous int64 [{x.shape[0]}] on {x.device}, got {out.dtype} {list(out.shape)}"
            )
        return self._best(x, 1, out.view(-1, 1), None).view(-1)

    def top(self, x: Tensor, k: int = gemm.TOP) -> tuple[Tensor, Tensor]:
        """The k <= 16 best: float32 [m, k] and int64 [m, k], best first."""
        if not 1 <= k <= gemm.TOP:
            raise ValueError(f"k must be 1..{gemm.TOP}, got {k}")
        if k > self.weight.shape[0]:
            raise ValueError(f"this head has {self.weight.shape[0]} tokens, not {k}")
        self._check(x)
        value = torch.empty(x.shape[0], k, device=x.device)
        index = torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device)
        return value, self._best(x, k, index, value)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"x must be [rows, {self.weight.shape[1]}], got {list(x.shape)}")

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
        best = self._lists(x.device)
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

    Left alone: layers whose second dimension is not a multiple of 64, subclasses of nn.Linear (they do more, or their
    owners read their weight), layers with hooks (which would be lost; some, as weight_norm's, make the weight) and `model`
    itself. A layer with several names stays one. Frees each BF16 weight as it goes, unless something else holds it, as an
    embedding does the weight of a tied head. Raises BadRequest, and changes nothing, for a weight on the meta device.
    """
    layers = [names for names in swappable(model) if wanted(names[0])]
    for names in layers:
        if model.get_submodule(names[0]).weight.is_meta:
            raise BadRequest(f"{names[0]} lies on the meta device: it has no weight yet", "fill the model first.")
    for names in layers:
        put(model, names, W12Linear.from_dense(model.get_submodule(names[0]), dependent=dependent))  # type: ignore[arg-type]
    return [name for names in layers for name in names]


def swappable(model: nn.Module) -> list[list[str]]:
    """The layers below `model` that W12 can take the place of, each with all names that it has."""
    layers: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and _swappable(module):
            layers.setdefault(id(module), []).append(name)
    return list(layers.values())


def fits_tiles(weight: Tensor) -> bool:
    """Whether a weight can be encoded and tiled: bfloat16 [N, K], K a multiple of 64, neither empty."""
    return (
        weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and min(weight.shape) > 0
        and weight.shape[1] % COLUMNS == 0
    )


def put(model: nn.Module, names: list[str], value: nn.Module | Tensor) -> None:
    """Set a layer, parameter or buffer under all its dotted names."""
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, value)


def _swappable(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and isinstance(module.weight, nn.Parameter)
        and not (module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module))  # no other way to ask
        and fits_tiles(module.weight)
    )
