"""Read a block drafter's `config.json` (DFlash, DFlash2) into a `DrafterShape`. Sources: facts sections 1.1 to 1.4.

A prompt look-up drafter (`ngram`) has no weights and no shape: pass None wherever a drafter shape is wanted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import CostModelError
from .shapes import DrafterShape, Matrix
from .targets import Config, attention_layers, head_dim, need, read_config

DEFAULT_BLOCK_SIZE = 16
"""The published default when neither `dflash_config` nor the top level names one (facts 1.2)."""


def drafter_shape(source: Config | Path | str) -> DrafterShape:
    """Read a DFlash or DFlash2 config (dict, file or folder); keys in `dflash_config` win over the top level."""
    config = read_config(source)
    names = [str(name) for name in config.get("architectures") or []]
    if names and not any("DFlash" in name or "Assistant" in name for name in names):
        raise CostModelError(f"drafter config: architectures {names} is not a DFlash drafter")
    own = config.get("dflash_config") or {}
    layers = need(config, "num_hidden_layers", "drafter config")
    hidden = need(config, "hidden_size", "drafter config")
    group, taps_in_time = own.get("conv_group_size"), own.get("conv_kernel_size")
    rank = int(_first(own, config, "selector_rank", 0))
    matrices = _matrices(config, hidden, layers, _taps(own, config, layers))
    conv_params = 0
    if group and taps_in_time:
        conv_params = 2 * layers * 2 * int(taps_in_time) * hidden
        out = 2 * int(taps_in_time) * (hidden // int(group))
        matrices += (Matrix("draft.conv", "kernel_projection", out, hidden, 2 * layers),)
    if rank:
        matrices += (Matrix("draft.selector", "hidden_projection", rank, hidden),)
    heads, kv, dim = _heads(config)
    return DrafterShape(
        family="dflash2" if rank or conv_params else "dflash",
        hidden=hidden,
        layers=layers,
        block_size=int(_first(own, config, "block_size", DEFAULT_BLOCK_SIZE)),
        taps=_taps(own, config, layers),
        matrices=matrices,
        attention=attention_layers(config, layers, heads, kv, dim),
        norm_params=2 * hidden + layers * (2 * hidden + 2 * dim),
        conv_params=conv_params,
        selector_rank=rank,
        selector_top_k=int(_first(own, config, "selector_top_k", 0)),
        vocab=need(config, "vocab_size", "drafter config"),
    )


def _first(own: Config, config: Config, key: str, default: Any) -> Any:
    for place in (own, config):
        if place.get(key) is not None:
            return place[key]
    return default


def _taps(own: Config, config: Config, layers: int) -> int:
    """Number of tapped target layers; one per draft layer unless the config lists them (facts 1.2)."""
    ids = _first(own, config, "target_layer_ids", None)
    return len(ids) if ids else layers


def _heads(config: Config) -> tuple[int, int, int]:
    heads = need(config, "num_attention_heads", "drafter config")
    kv = need(config, "num_key_value_heads", "drafter config") if config.get("num_key_value_heads") else heads
    return heads, kv, head_dim(config, "drafter config")


def _matrices(config: Config, hidden: int, layers: int, taps: int) -> tuple[Matrix, ...]:
    heads, kv, dim = _heads(config)
    intermediate = need(config, "intermediate_size", "drafter config")
    return (
        Matrix("draft.fc", "fc", hidden, taps * hidden),
        Matrix("draft.kv", "k_v", 2 * kv * dim, hidden, layers),
        Matrix("draft.qkv", "q", heads * dim, hidden, layers),
        Matrix("draft.o", "o", hidden, heads * dim, layers),
        Matrix("draft.mlp", "gate_up", 2 * intermediate, hidden, layers),
        Matrix("draft.mlp", "down", hidden, intermediate, layers),
    )
