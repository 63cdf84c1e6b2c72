"""A model filled from a packed checkpoint: its matrices stay in 12 bits, and never take the 16 that they were made from.

    with accelerate.init_empty_weights():  # parameters without memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    load_packed(model, Path("my-model-w12"), device="cuda")
    model.to("cuda")  # the buffers that no checkpoint holds

A model that has memory already is filled as well.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specpilot.kernels.w12.container.checkpoint import read_manifest
from specpilot.kernels.w12.container.packed_file import PackedFile
from specpilot.kernels.w12.errors import BadCheckpoint
from specpilot.kernels.w12.format import Planes, decode
from specpilot.kernels.w12.linear import W12Linear, put, swappable

_TYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool},
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}


def load_packed(
    model: nn.Module, folder: Path, *, device: torch.device | str = "cpu", dependent: bool = False
) -> list[str]:
    """Fill `model` from what `specpilot pack` wrote; the names of the layers that are in 12 bits now.

    A packed matrix becomes a `W12Linear` where the model has a bfloat16 nn.Linear for it, else it is decoded (an embedding, a
    subclass). What the model shares (a tied head) stays shared. `dependent`: as for `W12Linear`. Every tensor is compared
    with its checksum; one that the model does not know is left out with a warning. Raises BadCheckpoint for a damaged folder,
    and for one that lacks a weight of the model or has it in another shape; the model is then filled in part.
    """
    device = torch.device(device)
    if hasattr(model, "tie_weights"):  # of transformers: an empty model may have lost it
        model.tie_weights()  # type: ignore[operator]
    with ExitStack() as stack:
        files = [stack.enter_context(PackedFile(folder / row["packed"])) for row in read_manifest(folder)["files"]]
        held = {name: file for file in files for name in file.stored}
        names_of = _names(model, folder, held)
        layers = {f"{names[0]}.weight": names for names in swappable(model)}
        found: list[str] = []
        for name, names in names_of.items():
            layer = next((layers[own] for own in names if own in layers), None)
            if layer is None or not held[name].stored[name].packed or len(layer) < len(names):
                _fill(model, names, _dense(held[name], name).to(device))
                continue
            bias = getattr(model.get_submodule(layer[0]), "bias", None)
            packed = W12Linear.from_planes(_moved(held[name].planes(name), device), dependent=dependent)
            packed.register_buffer("bias", None if bias is None else bias.detach())
            put(model, layer, packed)
            found += layer
    empty = [name for name, tensor in model.named_buffers() if tensor.is_meta]
    if empty:
        raise BadCheckpoint(
            f"no checkpoint holds {empty[0]}, which lies on the meta device",
            "make such buffers elsewhere: only parameters may lie there.",
        )
    return found


def _names(model: nn.Module, folder: Path, held: dict[str, PackedFile]) -> dict[str, list[str]]:
    """Every stored tensor that the model has, with all names that it has there; biases first."""
    shared: dict[int, list[str]] = {}
    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in known.items():
        shared.setdefault(id(tensor), []).append(name)
    for names in shared.values():
        if not any(name in held for name in names):
            raise BadCheckpoint(f"{folder} has no {names[0]}, which the model needs", _HINT)
    strange = sorted(held.keys() - known.keys())
    if strange:
        warnings.warn(f"{folder}: the model has no {strange[0]}, and {len(strange)} in all are left out", stacklevel=3)
    for name in sorted(held.keys() & known.keys()):
        stored, wanted = list(held[name].stored[name].shape), list(known[name].shape)
        if stored != wanted:
            raise BadCheckpoint(f"{folder}: {name} is {stored}, the model's {wanted}", _HINT)
    found = [next(name for name in names if name in held) for names in shared.values()]
    return {name: shared[id(known[name])] for name in sorted(found, key=lambda name: name.endswith(".weight"))}


_HINT = "build the model from the config.json in that folder."


def _dense(file: PackedFile, name: str) -> Tensor:
    kept = file.stored[name]
    if kept.packed:
        return decode(file.planes(name))
    if kept.dtype not in _TYPES:
        raise BadCheckpoint(f"{file.path}: {name} is {kept.dtype}, which is not read", "unpack the checkpoint first.")
    raw = bytearray().join(file.tensor_bytes(name))
    values = torch.frombuffer(raw, dtype=_TYPES[kept.dtype]) if raw else torch.empty(0, dtype=_TYPES[kept.dtype])
    return values.view(kept.shape)


def _fill(model: nn.Module, names: list[str], value: Tensor) -> None:
    """In the place of the parameter or buffer of those names, as one."""
    parent, _, last = names[0].rpartition(".")
    old = getattr(model.get_submodule(parent), last)
    new = value.to(old.dtype)
    put(model, names, nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new)


def _moved(planes: Planes, device: torch.device) -> Planes:
    names = ("bytes", "codes", "base", "escape_index", "escape_word")
    return replace(planes, **{name: getattr(planes, name).to(device) for name in names})
