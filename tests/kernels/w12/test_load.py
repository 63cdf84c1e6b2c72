"""A model filled from a packed checkpoint computes what the original does, and says what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specpilot.kernels.w12.container.checkpoint import pack
from specpilot.kernels.w12.errors import BadCheckpoint
from specpilot.kernels.w12.linear import W12Linear
from specpilot.kernels.w12.load import load_packed


class Model(nn.Module):
    """A tied head, a bias, a shared layer, a persistent buffer and one that no checkpoint holds."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width, dtype=torch.bfloat16)
        self.up = nn.Linear(width, 320, dtype=torch.bfloat16)
        self.down = nn.Linear(320, width, bias=False, dtype=torch.bfloat16)
        self.again = self.down
        self.scale = nn.Parameter(torch.randn(width).bfloat16())
        self.head = nn.Linear(width, 300, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("angles", torch.ones(4), persistent=False)


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    x = model.embed(tokens) * model.scale
    x = model.down(torch.relu(model.up(x)))
    return model.head(x + model.again(torch.relu(model.up(x)))) + model.steps


def save(model: nn.Module, folder: Path, without: str = "", **more: torch.Tensor) -> Path:
    """A checkpoint as the official library writes it, packed."""
    folder.mkdir()
    kept = {
        name: t.clone()
        for name, t in model.state_dict().items()
        if name not in ("head.weight", "again.weight", without)
    }
    save_file(kept | more, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    pack(folder, folder.with_name(f"{folder.name}-w12"))
    return folder.with_name(f"{folder.name}-w12")


@pytest.mark.parametrize("empty", [False, True])
def test_a_filled_model_computes_the_same(empty: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Model()
    folder = save(original, tmp_path / "model")
    torch.manual_seed(1)
    model = Model()
    if empty:
        angles = model.angles
        model = model.to("meta")
        model.head.weight = model.embed.weight
        model.angles = angles
    assert load_packed(model, folder) == ["up", "down", "again"]
    assert type(model.up) is W12Linear and model.again is model.down
    assert model.head.weight is model.embed.weight, "what was tied is tied"
    tokens = torch.arange(7)
    assert torch.equal(logits(model, tokens), logits(original, tokens)), "the weights are the same, bit for bit"


def test_what_does_not_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save(Model(), tmp_path / "short", without="scale")
    with pytest.raises(BadCheckpoint, match="no scale, which the model needs"):
        load_packed(Model(), folder)
    with pytest.raises(BadCheckpoint, match="not a packed checkpoint"):
        load_packed(Model(), tmp_path / "short")
    folder = save(Model(), tmp_path / "whole")
    with pytest.raises(BadCheckpoint, match=r"down.weight is \[256, 320\], the model's \[512, 320\]"):
        load_packed(Model(512), folder)
    empty = Model().to("meta")
    with pytest.raises(BadCheckpoint, match="no head.weight"):
        load_packed(empty, folder)
    empty.tie_weights = lambda: setattr(empty.head, "weight", empty.embed.weight)
    with pytest.raises(BadCheckpoint, match="no checkpoint holds angles"):
        load_packed(empty, folder)


def test_a_tensor_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Model()
    folder = save(original, tmp_path / "more", **{"mtp.weight": torch.randn(256, 256).bfloat16()})
    model = Model()
    with pytest.warns(UserWarning, match="no mtp.weight, and 1 in all"):
        load_packed(model, folder)
    assert torch.equal(logits(model, torch.arange(3)), logits(original, torch.arange(3)))


def test_a_damaged_matrix_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save(Model(), tmp_path / "model")
    (packed,) = folder.glob("*.safetensors")
    data = bytearray(packed.read_bytes())
    data[-1000] ^= 1
    packed.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="damaged|does not match"):
        load_packed(Model(), folder)
