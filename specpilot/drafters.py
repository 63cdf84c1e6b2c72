"""A drafter's `config.json`, checked before anything is spent: readable, whole, and made for this target.

Knows the published DFlash keys (`dflash_config` wins over the top level). Reads files only, never weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specpilot.costmodel import CostModelError, drafter_shape
from specpilot.costmodel.targets import read_config
from specpilot.errors import ModelError

BLOCK_SIZES = range(2, 33)
"""Tokens of a block, the known one included; published drafters use 4 to 16, the gate believes at most 32."""
_SAME = ("hidden_size", "vocab_size")
"""Keys that must agree with the target's: the drafter borrows its embedding, head and residual stream."""


def check_drafter(folder: Path, target: Path | None = None) -> int:
    """The block size of the drafter in `folder`. Raises `ModelError` naming file, key and what is allowed.

    `target`: the target's folder, where it is known; then sizes and tapped layers must fit it.
    """
    path = folder / "config.json"
    try:
        config = read_config(path)
        drafter_shape(config)
    except CostModelError as error:
        raise _broken(path, str(error)) from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise _broken(path, f"a value has the wrong type ({type(error).__name__}: {error})") from error
    block = _key(config, "block_size", 16)
    if type(block) is not int or block not in BLOCK_SIZES:
        raise _broken(path, f"block_size {block!r}: allowed are {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}")
    mask = _key(config, "mask_token_id")
    if type(mask) is not int or not 0 <= mask < config["vocab_size"]:
        raise _broken(path, f"mask_token_id {mask!r}: must be a token below vocab_size {config['vocab_size']}")
    if target is not None:
        _check_fit(path, config, target / "config.json")
    return block


def _check_fit(path: Path, config: dict[str, Any], target: Path) -> None:
    try:
        other = read_config(target)
    except CostModelError as error:
        raise ModelError(str(error), "mend the target's checkpoint.") from error
    for key in _SAME:
        if key in other and config.get(key) != other[key]:
            raise _broken(path, f"{key} {config.get(key)}, but the target has {other[key]}")
    layers = other.get("num_hidden_layers")
    depth = _key(config, "num_target_layers", layers)
    if layers is not None and depth != layers:
        raise _broken(path, f"num_target_layers {depth}, but the target has {layers} layers")
    taps = _key(config, "target_layer_ids") or []
    if layers is not None and not all(type(tap) is int and 0 <= tap < layers for tap in taps):
        raise _broken(path, f"target_layer_ids {taps} are not layers of the target, 0 to {layers - 1}")


def _key(config: dict[str, Any], name: str, default: Any = None) -> Any:
    own = config.get("dflash_config") or {}
    return own[name] if own.get(name) is not None else config.get(name, default)


def _broken(path: Path, what: str) -> ModelError:
    words = what if str(path) in what else f"{path}: {what}"
    return ModelError(words, "give the folder of a DFlash drafter that was made for this target as drafter.path.")
