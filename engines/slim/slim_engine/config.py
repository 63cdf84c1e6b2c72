"""Model shapes from a checkpoint's config.json. Reads files only; no tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slim_engine.errors import CheckpointError
from slim_engine.values import flag, positive, whole, words

TARGETS = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # architecture -> has q/k norm
DRAFTERS = ("DFlashDraftModel",)
LARGEST_BLOCK = 32
"""Twice the largest published block, and what SpecPilot's gate believes."""
_MOST_LAYERS = 1000  # several times the deepest model; lists are made of so many
_LAYERS = ("full_attention", "sliding_attention")
_MEND = "mend it, or fetch the checkpoint again"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and the llama3 frequency scaling where `factor` is set."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """What target and drafter have in common."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    qk_norm: bool


@dataclass(frozen=True)
class TargetConfig(ModelConfig):
    """A dense Llama-family decoder."""

    architecture: str
    tied_head: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DrafterConfig(ModelConfig):
    """A DFlash block drafter. Tap id k is the residual stream after target layer k (0-based)."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint folder: no config.json; give one that has it")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8, or a thousand brackets
        raise CheckpointError(f"{path} is not valid JSON: {error}; {_MEND}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; give this user access to it") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}; {_MEND}")
    return value


def target_config(folder: Path) -> TargetConfig:
    """Raises CheckpointError for a missing key, a value that no such model has, or an architecture that is not in TARGETS."""
    with _told(folder):
        return _target_config(folder, read_config(folder))


def drafter_config(folder: Path, target: TargetConfig) -> DrafterConfig:
    """Keys are looked up in dflash_config first, then at top level, then take the default. Raises CheckpointError."""
    with _told(folder):
        return _drafter_config(folder, read_config(folder), target)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What wrong values in config.json raise, as CheckpointError."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{folder}/config.json has no key {error}; {_MEND}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}/config.json holds a value of the wrong kind: {error}; {_MEND}") from error


def _target_config(folder: Path, raw: dict[str, Any]) -> TargetConfig:
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in TARGETS:
        raise CheckpointError(f"{folder}: architecture {architecture} is not served; give one of {', '.join(TARGETS)}")
    common = _common(folder, raw, TARGETS[architecture])
    if raw.get("use_sliding_window") or "sliding_attention" in _layer_types(raw, common["num_layers"]):
        raise CheckpointError(f"{folder}: a target with sliding windows is not supported; give one with full attention")
    return TargetConfig(
        **common,
        architecture=architecture,
        tied_head=bool(flag(raw.get("tie_word_embeddings"), "tie_word_embeddings", False)),
        eos_token_ids=_eos(folder, raw, common["vocab_size"]),
    )


def _drafter_config(folder: Path, raw: dict[str, Any], target: TargetConfig) -> DrafterConfig:
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in DRAFTERS:
        raise CheckpointError(
            f"{folder}: drafter architecture {architecture} is not served; give a {', '.join(DRAFTERS)}"
        )
    nested = raw.get("dflash_config")
    if nested is not None and not isinstance(nested, dict):
        raise ValueError(f"dflash_config is {nested!r}, not an object")

    def key(name: str, default: Any = None) -> Any:
        value = None if nested is None else nested.get(name)
        value = raw.get(name) if value is None else value
        return default if value is None else value

    common = _common(folder, raw, True)
    layers = common["num_layers"]
    depth = key("num_target_layers", target.num_layers)
    if (
        common["hidden_size"] != target.hidden_size
        or common["vocab_size"] != target.vocab_size
        or depth != target.num_layers
    ):
        raise CheckpointError(
            f"{folder}: drafter is for hidden_size {common['hidden_size']}, vocab_size {common['vocab_size']}, {depth} layers; "
            f"the target has {target.hidden_size}, {target.vocab_size}, {target.num_layers}: give the drafter made for it"
        )
    types = _layer_types(raw, layers)
    if raw.get("layer_types") is None and raw.get("use_sliding_window"):
        raise CheckpointError(f"{folder}: use_sliding_window needs layer_types, to say which layers it means; add them")
    sliding = [t == "sliding_attention" for t in types]
    is_causal = flag(raw.get("is_causal"), "is_causal")
    softcap = key("final_logit_softcapping")
    return DrafterConfig(
        **common,
        block_size=whole(key("block_size", 16), "block_size", 2, LARGEST_BLOCK),
        mask_token_id=whole(key("mask_token_id"), "mask_token_id", 0, target.vocab_size - 1),
        target_layer_ids=_taps(key("target_layer_ids", default_taps(layers, target.num_layers)), target.num_layers),
        causal=tuple(s if is_causal is None else is_causal for s in sliding),
        windows=tuple(_size(raw, "sliding_window") if s else None for s in sliding),
        input_embedding_scale=positive(key("input_embedding_scale", 1.0), "input_embedding_scale"),
        output_multiplier=positive(key("output_multiplier", 1.0), "output_multiplier"),
        final_logit_softcapping=None if softcap is None else positive(softcap, "final_logit_softcapping"),
    )


def _taps(value: Any, depth: int) -> tuple[int, ...]:
    """In the order of the columns of `fc`, which need not be that of the layers; one may stand there twice."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"target_layer_ids is {value!r}, not a list of the target's layers")
    return tuple(whole(tap, "one of target_layer_ids", 0, depth - 1) for tap in value)


def _layer_types(raw: dict[str, Any], layers: int) -> list[str]:
    types = raw.get("layer_types")
    return ["full_attention"] * layers if types is None else words(types, "layer_types", _LAYERS, layers)


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """Evenly spread taps of the published method, Python's rounding to even included."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _common(folder: Path, raw: dict[str, Any], qk_norm: bool) -> dict[str, Any]:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{folder}: hidden_act {raw['hidden_act']} is not supported; give a checkpoint with silu")
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise CheckpointError(f"{folder}: attention_bias and mlp_bias are not supported; give a checkpoint without")
    heads, hidden = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim")
    head_dim = _size(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd, and rotary embedding turns pairs")
    return {
        "hidden_size": hidden,
        "intermediate_size": _size(raw, "intermediate_size"),
        "num_layers": whole(raw["num_hidden_layers"], "num_hidden_layers", 1, _MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _size(raw, "vocab_size"),
        "rms_norm_eps": positive(raw["rms_norm_eps"], "rms_norm_eps"),
        "rope": _rope(folder, raw),
        "max_position": _size(raw, "max_position_embeddings", 2048),
        "qk_norm": qk_norm,
    }


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1 on; a key that is absent or null takes the default. Raises KeyError, ValueError."""
    value = raw[key] if default is None else raw.get(key)
    return default if value is None and default is not None else whole(value, key)


def _rope(folder: Path, raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name), dict | None):
            raise ValueError(f"{name} is {raw[name]!r}, not an object")
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = positive(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_theta")
    part = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part not in (None, 1) or any(isinstance(value, dict) for value in scaling.values()):
        raise CheckpointError(
            f"{folder}: partial_rotary_factor and rope_parameters of each layer type are not supported; "
            "give a checkpoint whose layers all rotate whole heads"
        )
    kinds = {_rope_kind(raw[name]) for name in ("rope_parameters", "rope_scaling") if raw.get(name)} or {"default"}
    if kinds == {"default"}:
        return RopeConfig(theta)
    if len(kinds) > 1:
        raise ValueError(f"rope_parameters and rope_scaling disagree: {' and '.join(sorted(map(str, kinds)))}")
    if kinds != {"llama3"}:
        raise CheckpointError(
            f"{folder}: rope type {kinds.pop()} is not supported, only default and llama3; give another checkpoint"
        )
    factor, low, high = (positive(scaling[k], k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    if factor < 1 or high <= low:
        raise ValueError(f"factor {factor} is below 1, or high_freq_factor {high} not above low_freq_factor {low}")
    return RopeConfig(theta, factor, low, high, _size(scaling, "original_max_position_embeddings"))


def _rope_kind(scaling: dict[str, Any]) -> Any:
    """An object that scales without saying how is none of ours."""
    return scaling.get("rope_type", scaling.get("type", "unnamed" if "factor" in scaling else "default"))


def _eos(folder: Path, raw: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """EOS ids of generation_config.json where there is one (it is what generation stops at), else of config.json."""
    path = folder / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(whole(t, "eos_token_id", 0, vocab - 1) for t in (value if isinstance(value, list) else [value]))
