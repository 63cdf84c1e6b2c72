"""Whether the tensors of a checkpoint are those that its config.json speaks of: names, number of layers, shapes.

Read from the files' headers before any weight is laid out. A tensor that nobody asks for is as wrong as one that is missing: it is a layer
that would be left out, a bias, a scale, or a head that the config denies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slim_engine.checkpoint import weight_files
from slim_engine.config import ModelConfig, TargetConfig, drafter_config, target_config
from slim_engine.errors import CheckpointError
from slim_engine.loading import EngineOptions

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers that older tools stored with the weights; they follow from config.json."""
_MEND = "mend config.json, or fetch the checkpoint again"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Stored:
    """A tensor as a file's header tells of it."""

    file: Path
    shape: tuple[int, ...]


def checked(options: EngineOptions) -> EngineOptions:
    """`options`, if its checkpoints are whole and fit each other; a folder that is not there is for `load` to tell of.

    Raises CheckpointError.
    """
    if options.target.is_dir():
        config = target_config(options.target)
        check_target(options.target, config)
        if options.method == "dflash" and Path(options.drafter).is_dir():
            check_drafter(Path(options.drafter), options.target, config)
    return options


def check_target(folder: Path, config: TargetConfig) -> None:
    """Raises CheckpointError unless the weights in `folder` are those of `config`.

    A tied checkpoint may hold its head as well, if it is the embedding.
    """
    stored = _stored(folder)
    _check_layers(folder, stored, "model.layers.", config.num_layers)
    matrix = (config.vocab_size, config.hidden_size)
    shapes = _layer_shapes("model.layers.", config) | {_EMBEDDING: matrix, "model.norm.weight": (config.hidden_size,)}
    if not config.tied_head:
        shapes[_HEAD] = matrix
    copies = {_HEAD} if config.tied_head else set()
    _check_names(folder, stored, shapes, copies)
    for name in copies & set(stored):
        if not _equal(stored[name], name, stored[_EMBEDDING], _EMBEDDING):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is true, but {name} is not the embedding; set it to false in config.json, or "
                "fetch the checkpoint again"
            )


def check_drafter(folder: Path, target_folder: Path, target: TargetConfig) -> None:
    """Raises CheckpointError unless the drafter in `folder` is one for `target`, and its weights those of its config.json.

    Trainers leave copies of the target's embedding and head in a drafter; they must be the target's.
    """
    config = drafter_config(folder, target)
    stored = _stored(folder)
    _check_layers(folder, stored, "layers.", config.num_layers)
    h = config.hidden_size
    shapes: Shapes = {"fc.weight": (h, len(config.target_layer_ids) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    own_head = _EMBEDDING if target.tied_head else _HEAD
    copies = {"embed_tokens.weight": _EMBEDDING, _EMBEDDING: _EMBEDDING, _HEAD: own_head}
    _check_names(folder, stored, shapes | _layer_shapes("layers.", config), set(copies))
    kept = set(copies) & set(stored)
    theirs = _stored(target_folder) if kept else {}
    for name in kept:
        original = copies[name]
        if not _equal(stored[name], name, theirs[original], original):
            raise CheckpointError(
                f"{folder}: {name} is not the target's, and a drafter of this engine has none of its own; "
                "give the drafter made for this target"
            )


def _stored(folder: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name in found:
                        raise CheckpointError(
                            f"{folder}: {name} is both in {found[name].file.name} and in {path.name}; remove one of the files"
                        )
                    found[name] = Stored(path, tuple(file.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged or no safetensors file: {error}; fetch the checkpoint again"
            ) from error
    return found


def _check_layers(folder: Path, stored: dict[str, Stored], prefix: str, layers: int) -> None:
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    held = {int(match[1]) for match in map(pattern.match, stored) if match}
    found = max(held, default=-1) + 1
    if found != layers:
        raise CheckpointError(f"{folder}: num_hidden_layers is {layers}, but the weights hold {found} layers; {_MEND}")


def _check_names(folder: Path, stored: dict[str, Stored], shapes: Shapes, copies: set[str]) -> None:
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise CheckpointError(f"{folder}: no tensor {_some(missing)}, which config.json asks for; {_MEND}")
    extra = [name for name in stored if name not in shapes and name not in copies and not _COMPUTED.search(name)]
    if extra:
        raise CheckpointError(f"{folder}: nothing in config.json asks for {_some(extra)} of {stored[extra[0]].file.name}; {_MEND}")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise CheckpointError(f"{folder}: {name} has shape {stored[name].shape}, config.json says {shape}; {_MEND}")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _layer_shapes(prefix: str, config: ModelConfig) -> Shapes:
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    one: Shapes = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
    }
    if config.qk_norm:
        one |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return {f"{prefix}{layer}.{name}": shape for layer in range(config.num_layers) for name, shape in one.items()}


def _equal(one: Stored, name: str, other: Stored, other_name: str) -> bool:
    with safe_open(one.file, framework="pt") as a, safe_open(other.file, framework="pt") as b:
        left, right = a.get_tensor(name), b.get_tensor(other_name)
    if left.dtype != right.dtype:  # BF16 values, stored wider
        left, right = left.float(), right.float()
    return torch.equal(left, right)
