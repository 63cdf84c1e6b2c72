"""Model shapes from a checkpoint's config.json. Reads files only; no tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slim_engine.errors import CheckpointError

TARGETS = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # architecture -> has q/k norm
DRAFTERS = ("DFlashDraftModel",)


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
        raise CheckpointError(f"{folder} is not a checkpoint folder: no config.json")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def target_config(folder: Path) -> TargetConfig:
    """Raises CheckpointError for a missing key, a value of the wrong kind, or an architecture that is not in TARGETS."""
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
        raise CheckpointError(f"{folder}/config.json has no key {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}/config.json holds a value of the wrong kind: {error}") from error


def _target_config(folder: Path, raw: dict[str, Any]) -> TargetConfig:
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in TARGETS:
        raise CheckpointError(f"{folder}: architecture {architecture} is not served; known: {', '.join(TARGETS)}")
    if raw.get("attention_bias") or raw.get("mlp_bias") or raw.get("use_sliding_window"):
        raise CheckpointError(f"{folder}: attention_bias, mlp_bias and use_sliding_window are not supported")
    return TargetConfig(
        **_common(folder, raw, TARGETS[architecture]),
        architecture=architecture,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(folder, raw),
    )


def _drafter_config(folder: Path, raw: dict[str, Any], target: TargetConfig) -> DrafterConfig:
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in DRAFTERS:
        raise CheckpointError(
            f"{folder}: drafter architecture {architecture} is not served; known: {', '.join(DRAFTERS)}"
        )
    nested = raw.get("dflash_config") or {}

    def key(name: str, default: Any = None) -> Any:
        value = nested.get(name)
        return raw.get(name, default) if value is None else value

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
            f"the target has {target.hidden_size}, {target.vocab_size}, {target.num_layers}"
        )
    mask = key("mask_token_id")
    if mask is None or not 0 <= mask < target.vocab_size:
        raise CheckpointError(f"{folder}: mask_token_id {mask} is missing or outside the vocabulary")
    taps = tuple(key("target_layer_ids") or default_taps(layers, depth))
    if not all(0 <= t < depth for t in taps):
        raise CheckpointError(f"{folder}: target_layer_ids {taps} outside the target's {depth} layers")
    block = int(key("block_size", 16))
    if block < 2:
        raise CheckpointError(f"{folder}: block_size {block}, must be at least 2")
    types = raw.get("layer_types") or ["full_attention"] * layers
    sliding = [t == "sliding_attention" for t in types]
    is_causal = raw.get("is_causal")
    return DrafterConfig(
        **common,
        block_size=block,
        mask_token_id=int(mask),
        target_layer_ids=taps,
        causal=tuple(s if is_causal is None else bool(is_causal) for s in sliding),
        windows=tuple(_size(raw, "sliding_window") if s else None for s in sliding),
        input_embedding_scale=float(key("input_embedding_scale", 1.0)),
        output_multiplier=float(key("output_multiplier", 1.0)),
        final_logit_softcapping=key("final_logit_softcapping"),
    )


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """Evenly spread taps of the published method, Python's rounding to even included."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _common(folder: Path, raw: dict[str, Any], qk_norm: bool) -> dict[str, Any]:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{folder}: hidden_act {raw['hidden_act']} is not supported, only silu")
    heads = _size(raw, "num_attention_heads")
    hidden = _size(raw, "hidden_size")
    return {
        "hidden_size": hidden,
        "intermediate_size": _size(raw, "intermediate_size"),
        "num_layers": _size(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": _size(raw, "num_key_value_heads", heads),
        "head_dim": _size(raw, "head_dim", hidden // heads),
        "vocab_size": _size(raw, "vocab_size"),
        "rms_norm_eps": float(raw["rms_norm_eps"]),
        "rope": _rope(folder, raw),
        "max_position": _size(raw, "max_position_embeddings", 2048),
        "qk_norm": qk_norm,
    }


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1 on. Raises KeyError, ValueError."""
    value = raw[key] if default is None else raw.get(key) or default
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a whole number from 1 on")
    return value


def _rope(folder: Path, raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        return RopeConfig(
            theta,
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            int(scaling["original_max_position_embeddings"]),
        )
    raise CheckpointError(f"{folder}: rope type {kind} is not supported, only default and llama3")


def _eos(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """EOS ids of generation_config.json where there is one (it is what generation stops at), else of config.json."""
    path = folder / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))
