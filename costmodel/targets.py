"""Read a target's `config.json` into a `TargetShape`.

Families: Llama and its relatives (mistral, qwen2), Qwen3, the hybrid gated-delta-rule Qwen3.5 / 3.8, and
Muse Glimmer. The published shapes in facts section 3 are the test values. No torch, no weights: only the config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CostModelError
from .shapes import Attention, Matrix, Recurrent, TargetShape

Config = Mapping[str, Any]

_BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0, "float64": 64.0}
_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "muse_glimmer": "muse_glimmer",
    "muse_glimmer_text": "muse_glimmer",
}


def read_config(source: Config | Path | str) -> dict[str, Any]:
    """Return a config as a dict; `source` is one already, a `config.json`, or a checkpoint folder that holds one."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CostModelError(f"{path} does not exist: give a checkpoint folder or its config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CostModelError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CostModelError(f"{path} must hold a JSON object")
    return value


def need(config: Config, key: str, where: str) -> int:
    """Return a positive integer field, or say which one is missing or wrong, and in what."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CostModelError(f"{where}: `{key}` must be a positive integer, found {value!r}")
    return value


def head_dim(config: Config, where: str) -> int:
    """Return `head_dim`, or hidden_size / num_attention_heads when the config has none."""
    if config.get("head_dim"):
        return need(config, "head_dim", where)
    return need(config, "hidden_size", where) // need(config, "num_attention_heads", where)


def target_shape(source: Config | Path | str) -> TargetShape:
    """Read a target's config (dict, file or folder). Raises `CostModelError` for a family it does not know."""
    outer = read_config(source)
    inner = outer.get("text_config")
    config: dict[str, Any] = {**outer, **inner} if isinstance(inner, Mapping) else outer
    model_type = str(config.get("model_type", ""))
    family = _FAMILIES.get(model_type)
    if family is None:
        raise CostModelError(
            f"target config: model_type {model_type!r} has no arithmetic here; known: {', '.join(sorted(_FAMILIES))}"
        )
    if family == "qwen3_5":
        return _qwen3_5(config)
    if family == "muse_glimmer":
        return _muse_glimmer(config)
    return _dense(config, family)


def _bits(config: Config) -> float:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return _BITS.get(name, 16.0)


def _mlp(hidden: int, intermediate: int, layers: int) -> tuple[Matrix, Matrix]:
    return (
        Matrix("target.mlp", "gate_up", 2 * intermediate, hidden, layers),
        Matrix("target.mlp", "down", hidden, intermediate, layers),
    )


def _dense(config: Config, family: str) -> TargetShape:
    where = f"{family} config"
    hidden, layers = need(config, "hidden_size", where), need(config, "num_hidden_layers", where)
    heads = need(config, "num_attention_heads", where)
    kv = need(config, "num_key_value_heads", where) if config.get("num_key_value_heads") else heads
    dim, vocab = head_dim(config, where), need(config, "vocab_size", where)
    per_head = 2 * dim if family == "qwen3" else 0
    return TargetShape(
        family=family,
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        matrices=(
            Matrix("target.qkv", "qkv", (heads + 2 * kv) * dim, hidden, layers),
            Matrix("target.o", "o", hidden, heads * dim, layers),
            *_mlp(hidden, need(config, "intermediate_size", where), layers),
            Matrix("target.head", "lm_head", vocab, hidden),
        ),
        attention=attention_layers({**config, "layer_types": _dense_kinds(config, layers)}, layers, heads, kv, dim),
        recurrent=(),
        norm_params=layers * (2 * hidden + per_head),
        tied=bool(config.get("tie_word_embeddings", False)),
        weight_bits=_bits(config),
    )


def _dense_kinds(config: Config, layers: int) -> list[str]:
    """`layer_types`, or what its absence means to a family: with a window, Mistral slides everywhere, and Qwen from
    `max_window_layers` on if `use_sliding_window` says so (transformers' configuration classes)."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    windowed, first = bool(config.get("sliding_window")), 0
    if config.get("model_type") in ("qwen2", "qwen3"):
        windowed = windowed and bool(config.get("use_sliding_window"))
        first = int(config.get("max_window_layers", layers))
    elif config.get("model_type") != "mistral":
        windowed = False
    return ["sliding_attention" if windowed and i >= first else "full_attention" for i in range(layers)]


def attention_layers(config: Config, layers: int, heads: int, kv: int, dim: int) -> tuple[Attention, ...]:
    """Split the attention layers into full and sliding ones by `layer_types`; without it all are full."""
    kinds = list(config.get("layer_types") or ["full_attention"] * layers)
    if len(kinds) != layers:
        raise CostModelError(f"config: layer_types has {len(kinds)} entries for {layers} layers")
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    full = sum(kind == "full_attention" for kind in kinds)
    window = config.get("sliding_window")
    found = []
    if full:
        found.append(Attention(full, heads, kv, dim))
    if sliding:
        found.append(Attention(sliding, heads, kv, dim, int(window) if window else None))
    return tuple(found)


def _qwen3_5(config: Config) -> TargetShape:
    where = "qwen3_5 config"
    hidden, layers = need(config, "hidden_size", where), need(config, "num_hidden_layers", where)
    heads, kv = need(config, "num_attention_heads", where), need(config, "num_key_value_heads", where)
    dim, vocab = head_dim(config, where), need(config, "vocab_size", where)
    kinds = config.get("layer_types")
    if kinds is None:
        every = need(config, "full_attention_interval", where)
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    full = sum(kind == "full_attention" for kind in kinds)
    linear = len(kinds) - full
    k_heads, v_heads = need(config, "linear_num_key_heads", where), need(config, "linear_num_value_heads", where)
    k_dim, v_dim = need(config, "linear_key_head_dim", where), need(config, "linear_value_head_dim", where)
    width = need(config, "linear_conv_kernel_dim", where)
    value, mixed = v_heads * v_dim, 2 * k_heads * k_dim + v_heads * v_dim
    gated = 2 if config.get("attn_output_gate", True) else 1
    return TargetShape(
        family="qwen3_5",
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        matrices=(
            Matrix("target.qkv", "attention_qkv_gate", (gated * heads + 2 * kv) * dim, hidden, full),
            Matrix("target.o", "attention_o", hidden, heads * dim, full),
            Matrix("target.qkv", "gdn_in", mixed + value, hidden, linear),
            Matrix("target.qkv", "gdn_in_a_b", 2 * v_heads, hidden, linear, packed=False),
            Matrix("target.attention", "gdn_conv", mixed, width, linear, packed=False),
            Matrix("target.attention", "gdn_gates", 2, v_heads, linear, packed=False),
            Matrix("target.o", "gdn_out", hidden, value, linear),
            *_mlp(hidden, need(config, "intermediate_size", where), layers),
            Matrix("target.head", "lm_head", vocab, hidden),
        ),
        attention=(Attention(full, heads, kv, dim),) if full else (),
        recurrent=(Recurrent(linear, v_heads, k_dim, v_dim, mixed, width),) if linear else (),
        norm_params=layers * 2 * hidden + full * 2 * dim + linear * v_dim,
        tied=bool(config.get("tie_word_embeddings", False)),
        weight_bits=_bits(config),
    )


def _muse_glimmer(config: Config) -> TargetShape:
    where = "muse_glimmer config"
    hidden, layers = need(config, "hidden_size", where), need(config, "num_hidden_layers", where)
    heads, kv = need(config, "num_attention_heads", where), need(config, "num_key_value_heads", where)
    dim, vocab = head_dim(config, where), need(config, "vocab_size", where)
    kinds = config.get("layer_types") or [
        "full_attention" if (layers - 1 - i) % 4 == 0 else "sliding_attention" for i in range(layers)
    ]
    return TargetShape(
        family="muse_glimmer",
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        matrices=(
            Matrix("target.qkv", "q_gate_k_v", (2 * heads + 2 * kv) * dim, hidden, layers),
            Matrix("target.o", "o", hidden, heads * dim, layers),
            *_mlp(hidden, need(config, "intermediate_size", where), layers),
            Matrix("target.head", "lm_head", vocab, hidden),
        ),
        attention=attention_layers({**config, "layer_types": kinds}, layers, heads, kv, dim),
        recurrent=(),
        norm_params=layers * 4 * hidden,
        tied=bool(config.get("tie_word_embeddings", False)),
        weight_bits=_bits(config),
    )
