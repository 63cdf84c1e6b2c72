"""A model filled from a packed checkpoint: its matrices stay in 12 bits, and never take the 16 that they were made from.

    config = AutoConfig.from_pretrained("my-model-w12")
    with accelerate.init_empty_weights():  # parameters without memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    load_packed(model, "my-model-w12", device="cuda")
    model.to("cuda").eval()  # the buffers that no checkpoint holds; `from_config` leaves a model in training

A model that has memory already is filled as well. Names are taken as they are stored: where a library renames or stacks
tensors while it loads (the experts of a transformers mixture), the model's own names are not found, and that is said.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specpilot.kernels.w12.container.checkpoint import MANIFEST, read_manifest, sha256_of
from specpilot.kernels.w12.container.packed_file import PackedFile
from specpilot.kernels.w12.errors import BadCheckpoint, BadRequest
from specpilot.kernels.w12.format import Planes, decode
from specpilot.kernels.w12.linear import W12Linear, W12Weight, put, swappable

_TYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool},
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}


def load_packed(
    model: nn.Module, folder: Path | str, *, device: torch.device | str = "cpu", dependent: bool = False
) -> list[str]:
    """Fill `model` from what `specpilot pack` wrote; the names of the layers that are in 12 bits now.

    A packed matrix becomes a `W12Linear` where the model has a bfloat16 nn.Linear for it, else it is decoded (an embedding, a
    subclass, a layer with hooks). What the model shares (a tied head) stays shared, in 16 bits. `dependent`: as for
    `W12Linear`. Every tensor is compared with its checksum. Warns of tensors that the model does not know, of values that
    were rounded to the model's type, of a model in which no layer came into 12 bits, and of a changed config.json.
    Raises BadCheckpoint for a damaged folder, and for one that lacks a weight of the model, has it in another shape, or holds
    two for what the model has once; after damage in a tensor the model is filled in part. Raises BadRequest for a model that
    has layers in 12 bits already.
    """
    device, folder = torch.device(device), Path(folder)
    if any(isinstance(module, W12Weight) for module in model.modules()):
        raise BadRequest("the model has layers in 12 bits already", "build it anew, and load or swap once.")
    if hasattr(model, "tie_weights"):  # of transformers: an empty model may have lost it
        model.tie_weights()  # type: ignore[operator]
    with ExitStack() as stack:
        held = _held(folder, stack)
        names_of = _names(model, folder, held)
        layers = {f"{names[0]}.weight": names for names in swappable(model)}
        found: list[str] = []
        rounded: list[str] = []
        for name, names in names_of.items():
            layer = next((layers[own] for own in names if own in layers), None)
            if layer is None or not held[name].stored[name].packed or len(layer) < len(names):
                if not _fill(model, names, _dense(held[name], name).to(device)):
                    rounded.append(name)
                continue
            bias = getattr(model.get_submodule(layer[0]), "bias", None)
            packed = W12Linear.from_planes(_moved(held[name].planes(name), device), dependent=dependent)
            packed.register_buffer("bias", None if bias is None else bias.detach())
            put(model, layer, packed)
            found += layer
        if not found and any(held[name].stored[name].packed for name in names_of):
            warnings.warn(
                f"{folder}: no layer is in 12 bits, since no packed matrix belongs to a bfloat16 nn.Linear of the model",
                stacklevel=2,
            )
    if rounded:
        warnings.warn(
            f"{folder}: {rounded[0]}, and {len(rounded)} in all, do not fit the model's type and were rounded",
            stacklevel=2,
        )
    return found


def _held(folder: Path, stack: ExitStack) -> dict[str, PackedFile]:
    """Every stored tensor and the file that holds it, open for as long as `stack` is."""
    held: dict[str, PackedFile] = {}
    for row in _manifest(folder)["files"]:
        file = stack.enter_context(_open(folder, row))
        for name, kept in file.stored.items():
            if held.setdefault(name, file).stored[name].sha256 != kept.sha256:
                raise BadCheckpoint(
                    f"{folder}: {held[name].path.name} and {file.path.name} hold different tensors {name}",
                    "leave one of them out of the checkpoint, and pack again.",
                )
    return held


def _manifest(folder: Path) -> dict[str, Any]:
    """Warns of a config.json that is not the packed one: the model was built from it, presumably."""
    manifest = read_manifest(folder)
    for row in manifest["copied"]:
        path = folder / row["name"]
        if row["name"] == "config.json" and path.is_file():
            if sha256_of(path) != row["sha256"]:
                warnings.warn(f"{path} is not the one that was packed", stacklevel=3)
    return manifest


def _open(folder: Path, row: dict[str, Any]) -> PackedFile:
    """A file that the manifest lists, and no other: one of another checkpoint has valid sums as well."""
    file = PackedFile(folder / row["packed"])
    found = (file.size, file.header_sha256)
    if found != (row.get("packed_bytes", found[0]), row.get("packed_header_sha256", found[1])):
        with file:
            raise BadCheckpoint(f"{file.path} is not the file that {MANIFEST} lists", "copy the folder again.")
    return file


def _names(model: nn.Module, folder: Path, held: dict[str, PackedFile]) -> dict[str, list[str]]:
    """Every stored tensor that the model has, with all names that it has there; biases first."""
    shared: dict[int, list[str]] = {}
    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in known.items():
        shared.setdefault(id(tensor), []).append(name)
    for names in shared.values():
        if not any(name in held for name in names):
            raise BadCheckpoint(f"{folder} has no {names[0]}, which the model needs", _HINT)
        sums = {name: str(held[name].stored[name].sha256) for name in names if name in held}
        if len(set(sums.values())) > 1:
            raise BadCheckpoint(
                f"{folder}: the model shares one tensor as {' and '.join(sums)}, which are different there",
                "build it so that it does not (tie_word_embeddings=False in its config), or make them equal.",
            )
    empty = [name for name, tensor in model.named_buffers() if tensor.is_meta and name not in known]
    if empty:
        raise BadCheckpoint(
            f"no checkpoint holds {empty[0]}, which lies on the meta device",
            "make such buffers elsewhere: only parameters may lie there (accelerate.init_empty_weights).",
        )
    strange = sorted(held.keys() - known.keys())
    if strange:
        warnings.warn(f"{folder}: the model has no {strange[0]}, and {len(strange)} in all are left out", stacklevel=3)
    for name in sorted(held.keys() & known.keys()):
        stored, wanted = list(held[name].stored[name].shape), list(known[name].shape)
        if stored != wanted:
            raise BadCheckpoint(f"{folder}: {name} is {stored}, the model's {wanted}", _HINT)
    found = [next(name for name in names if name in held) for names in shared.values()]
    return {name: shared[id(known[name])] for name in sorted(found, key=lambda name: name.endswith(".weight"))}


_HINT = "build the model from the config.json in that folder, with the names that its tensors have there."


def _dense(file: PackedFile, name: str) -> Tensor:
    kept = file.stored[name]
    if kept.packed:
        return decode(file.planes(name))
    if kept.dtype not in _TYPES:
        raise BadCheckpoint(f"{file.path}: {name} is {kept.dtype}, which is not read", "unpack the checkpoint first.")
    raw = bytearray().join(file.tensor_bytes(name))
    values = torch.frombuffer(raw, dtype=_TYPES[kept.dtype]) if raw else torch.empty(0, dtype=_TYPES[kept.dtype])
    return values.view(kept.shape)


def _fill(model: nn.Module, names: list[str], value: Tensor) -> bool:
    """In the place of the parameter or buffer of those names, as one; whether its type holds the values."""
    parent, _, last = names[0].rpartition(".")
    old = getattr(model.get_submodule(parent), last)
    new = value.to(old.dtype)
    put(model, names, nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new)
    if old.dtype == value.dtype or (old.dtype, value.dtype) == (torch.float32, torch.bfloat16):
        return True
    return bool(((new.to(value.dtype) == value) | (value != value)).all())


def _moved(planes: Planes, device: torch.device) -> Planes:
    names = ("bytes", "codes", "base", "escape_index", "escape_word")
    return replace(planes, **{name: getattr(planes, name).to(device) for name in names})
