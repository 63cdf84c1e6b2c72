"""A model filled from a packed checkpoint computes what the original does, and says what does not fit."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specpilot.kernels.w12.container.checkpoint import MANIFEST, pack
from specpilot.kernels.w12.errors import BadCheckpoint, BadRequest
from specpilot.kernels.w12.linear import W12Linear, swap
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
        # torch's own start values are drawn in bfloat16: how many are exactly zero, hence escape, differs by processor.
        for layer in (self.embed, self.up, self.down):
            layer.weight.data = torch.randn(layer.weight.shape).mul(0.04).bfloat16()


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


def test_a_model_is_filled_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Model()
    folder = save(original, tmp_path / "model")
    model = Model()
    load_packed(model, str(folder))  # a string is a folder as well
    model.tie_weights = lambda: pytest.fail("it was touched")
    with pytest.raises(BadRequest, match="in 12 bits already"):
        load_packed(model, folder)
    assert torch.equal(logits(model, torch.arange(3)), logits(original, torch.arange(3))), "and is as it was"


def test_no_layer_in_12_bits_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Model()
    folder = save(original, tmp_path / "model")
    model = Model().float()
    with pytest.warns(UserWarning, match="no layer is in 12 bits"):
        assert load_packed(model, folder) == []
    assert torch.equal(model.up.weight, original.up.weight.float()), "bfloat16 fits into float32"


def test_rounding_is_said(tmp_path: Path) -> None:
    """A router's bias kept in float32, in a model that was built in bfloat16."""
    torch.manual_seed(0)
    original = Model()
    original.scale = nn.Parameter(original.scale.float() + 1e-6)
    folder = save(original, tmp_path / "wide")
    with pytest.warns(UserWarning, match="scale, and 1 in all, do not fit"):
        load_packed(Model(), folder)
    original.scale = nn.Parameter(original.scale.bfloat16().float())
    original.scale.data[0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_packed(Model(), save(original, tmp_path / "fits"))


def test_what_is_shared_must_be_one_in_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Model()
    load_packed(Model(), save(original, tmp_path / "same", **{"head.weight": original.embed.weight.detach().clone()}))
    folder = save(original, tmp_path / "other", **{"head.weight": torch.randn(300, 256).bfloat16()})
    with pytest.raises(BadCheckpoint, match=r"shares one tensor as embed\.weight and head\.weight"):
        load_packed(Model(), folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Model()
    save(original, tmp_path / "model")
    for name, weight in (("same", original.up.weight.detach()), ("other", torch.randn(320, 256).bfloat16())):
        save_file({"up.weight": weight.contiguous()}, tmp_path / "model/second.safetensors")
        pack(tmp_path / "model", tmp_path / name)
    load_packed(Model(), tmp_path / "same")
    with pytest.raises(BadCheckpoint, match="hold different tensors up.weight"):
        load_packed(Model(), tmp_path / "other")


def test_a_buffer_without_memory_is_told_before_the_work(tmp_path: Path) -> None:
    folder = save(Model(), tmp_path / "model")
    with torch.device("meta"):
        model = Model()
    with pytest.raises(BadCheckpoint, match="no checkpoint holds angles"):
        load_packed(model, folder)
    assert type(model.up) is nn.Linear and model.scale.is_meta


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The manifest, with a checksum that is right: anybody can make one."""
    value = json.loads((folder / MANIFEST).read_text())
    del value["sha256"]
    change(value["files"][0])
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    (folder / MANIFEST).write_text(json.dumps({**value, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("packed"), "malformed"),
        (lambda row: row.update(packed="\ud800"), "malformed"),
        (lambda row: row.update(packed_bytes=row["packed_bytes"] + 64), "is not the file that w12.json lists"),
        (lambda row: row.update(packed_header_sha256="0" * 64), "is not the file that w12.json lists"),
        (lambda row: row.update(packed="gone" * 1000), "cannot be read"),
    ],
)
def test_a_manifest_that_no_writer_makes(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    folder = save(Model(), tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(BadCheckpoint, match=message):
        load_packed(Model(), folder)


@pytest.mark.parametrize("name", [MANIFEST, "model.w12.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = save(Model(), tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(BadCheckpoint, match="no regular file"):
        load_packed(Model(), folder)


def test_another_config_is_told(tmp_path: Path) -> None:
    folder = save(Model(), tmp_path / "model")
    (folder / "config.json").write_text('{"rope_theta": 1}')
    with pytest.warns(UserWarning, match=r"config\.json is not the one that was packed"):
        load_packed(Model(), folder)


def test_layers_with_hooks_stay(tmp_path: Path) -> None:
    """A hook would be lost, and one of weight_norm's kind makes the weight only when the layer is called."""
    torch.manual_seed(0)
    folder = save(Model(), tmp_path / "model")
    model, calls = Model(), []
    model.up.register_forward_hook(lambda *_: calls.append("after"))
    model.down.register_forward_pre_hook(lambda *_: calls.append("before"))
    assert swap(model, lambda name: name in ("up", "down")) == []
    with pytest.warns(UserWarning, match="no layer is in 12 bits"):
        load_packed(model, folder)
    logits(model, torch.arange(3))
    assert "before" in calls and "after" in calls
    model.again.forward = lambda x: calls.append("own")  # type: ignore[method-assign]
    assert swap(model, lambda name: name == "down") == []


def test_a_layer_without_memory_is_not_swapped() -> None:
    model = Model()
    model.down.to("meta")
    with pytest.raises(BadRequest, match="down lies on the meta device"):
        swap(model, lambda name: name in ("up", "down"))
    assert type(model.up) is nn.Linear, "nothing was changed"
