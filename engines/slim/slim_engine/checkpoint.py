"""Checkpoint folders: safetensors into tensors, and the digests that say which weights are being served."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slim_engine.errors import CheckpointError


class Weights:
    """The tensors of one checkpoint folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():
                        self._tensors[name] = file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is damaged or no safetensors file: {error}; fetch the checkpoint again"
                ) from error

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        """Tensor `name`, BF16 as every matrix of a served checkpoint is. Raises CheckpointError for name, shape or dtype."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.folder}: no tensor {name}; fetch the checkpoint again")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}; fetch the checkpoint again")
        if tensor.dtype != torch.bfloat16:
            raise CheckpointError(f"{self.folder}: {name} is {tensor.dtype}; convert the checkpoint to BF16 first")
        return tensor

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm weight as float32 [size]."""
        return self.matrix(name, size).float()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`, sorted. Raises CheckpointError if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; fetch the checkpoint again")
    return files


def digest(folder: Path) -> str:
    """sha256 of the weights: of the file itself if there is one, else of the lines `sha256  name` of the sorted files."""
    sums = {path.name: _sha256(path) for path in weight_files(folder)}
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in sums.items()).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
