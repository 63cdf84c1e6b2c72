"""W12 inside a real SGLang (0.5.17 or newer), through its own plugin interface: the server is the user's, unchanged.

    SPECPILOT_SGLANG_W12=. python -m sglang.launch_server --model-path MODEL ...

The variable is a regular expression over module names; without it nothing happens. Every bfloat16 linear layer whose name it
finds is encoded once the weights are there, also of a drafter, and multiplies from 12 bits in steps of up to 64 rows
(requests at once, times the block of a drafter); above, the library multiplies by the BF16 weight, which stays beside. With
SPECPILOT_SGLANG_W12_FREE=1 it is freed instead: a quarter less memory than BF16, but a step of 128 rows takes half as long again. Heads keep
theirs, since drafters read it. Layers whose weight others read (`kv_b_proj`) and those of vision towers stay as they
are. Weights cannot be updated afterwards. Outputs are those of the BF16 weights, in another order of additions than cuBLAS's.

Tune the model's shapes for the card first (experiments/w12/tune.py --shapes): that is more than half of the gain.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpilot.kernels.w12.gemm import MAX_ROWS
from specpilot.kernels.w12.linear import W12Weight, fits_tiles, from_linear

VARIABLE, FREE = "SPECPILOT_SGLANG_W12", "SPECPILOT_SGLANG_W12_FREE"
LEAST_WEIGHTS = 1 << 20
"""Smaller matrices stay in the cache, or are latency."""
LEFT_ALONE = re.compile(r"kv_b_proj|visual|vision")
BLOCK_DRAFTERS_READ = "qkv_proj"
"""Block drafters slice this weight to fill their cache in one fused pass, which W12 would cost them."""
LOADERS = ("DefaultModelLoader", "DummyModelLoader")
log = logging.getLogger(__name__)


class W12LinearMethod:
    """What SGLang calls a quantisation method: how a layer multiplies."""

    def __init__(self, weight: W12Weight) -> None:
        self.weight = weight

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: bfloat16 [..., K]; bias: [N] or None."""
        dense: Tensor = layer.weight  # type: ignore[assignment]
        if dense.numel() and x.numel() > MAX_ROWS * x.shape[-1]:
            return F.linear(x, dense, bias)
        if x.stride(-1) != 1 or x.stride(-2) % 8 or x.data_ptr() % 16:  # the kernels copy 16 bytes at a time
            x = x.clone(memory_format=torch.contiguous_format)
        return self.weight.product(x, bias=bias, dependent=x.is_cuda)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is left to do."""


class W12HeadMethod(W12LinearMethod):
    """Of a head, which may be the embedding too."""

    def embedding(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Rows of the BF16 weight."""
        return F.embedding(tokens, layer.weight)  # type: ignore[arg-type]


METHODS = {"UnquantizedLinearMethod": W12LinearMethod, "UnquantizedEmbeddingMethod": W12HeadMethod}


def swap(model: nn.Module, wanted: Callable[[str], object], *, free: bool = False) -> list[str]:
    """Give every layer that is wanted and fit the W12 method; their names. free: do not keep BF16 weights beside."""
    swapped: list[str] = []
    drafter = any(kind in type(model).__name__ for kind in ("DFlash", "DSpark"))
    for name, layer in model.named_modules():
        made = METHODS.get(type(getattr(layer, "quant_method", None)).__name__)
        if made is None or LEFT_ALONE.search(name) or not wanted(name) or not _fit(layer):
            continue
        if drafter and name.endswith(BLOCK_DRAFTERS_READ):
            continue
        if made is W12HeadMethod and not name.endswith("lm_head"):
            continue  # a table of which single rows are read
        layer.quant_method = made(from_linear(layer.weight.detach()))
        if free and made is W12LinearMethod:
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
        swapped.append(name)
    return swapped


def _fit(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and fits_tiles(weight) and weight.numel() >= LEAST_WEIGHTS


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`, called in every process of the server."""
    pattern = os.environ.get(VARIABLE)
    if not pattern:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted, free = re.compile(pattern).search, os.environ.get(FREE) == "1"

    def loaded(model: Any, *_: Any, **__: Any) -> Any:
        before = torch.cuda.memory_allocated()
        names = swap(model, wanted, free=free)
        more = (torch.cuda.memory_allocated() - before) / 1e9
        log.warning("W12: %d layers of %s in 12 bits, %+.2f GB", len(names), type(model).__name__, more)
        return model

    for loader in LOADERS:
        HookRegistry.register(f"sglang.srt.model_loader.loader.{loader}.load_model", loaded, HookType.AFTER)
