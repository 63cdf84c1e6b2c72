"""Layers as SGLang builds them (a method object that multiplies), swapped by name; the real server: experiments/w12/sglang_serving.py."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specpilot.kernels.w12 import sglang_plugin
from specpilot.kernels.w12.sglang_plugin import W12HeadMethod, W12LinearMethod, register, swap
from tests.helpers.scripts import scripts_of

with scripts_of(Path(__file__).parents[3] / "experiments" / "w12"):
    import sglang_serving


class UnquantizedLinearMethod:
    """Of that name in SGLang."""


class UnquantizedEmbeddingMethod:
    """Of that name in SGLang."""


class Layer(nn.Module):
    def __init__(self, rows: int, columns: int, method: object, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(rows, columns) * 0.02).to(dtype), requires_grad=False)
        self.quant_method = method


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    linear, table = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
    return nn.ModuleDict(
        {
            "embed_tokens": Layer(2048, 512, table()),
            "lm_head": Layer(2048, 512, table()),
            "qkv_proj": Layer(2048, 512, linear()),
            "o_proj": Layer(4096, 512, linear()),
            "kv_b_proj": Layer(2048, 512, linear()),
            "small": Layer(64, 512, linear()),
            "wide": Layer(2048, 512, linear(), torch.float32),
            "odd": Layer(4096, 500, linear()),
        }
    )


@pytest.mark.parametrize("free", [False, True])
def test_what_is_fit_multiplies_from_twelve_bits(free: bool) -> None:
    layers = model()
    dense = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    assert swap(layers, lambda name: True, free=free) == ["lm_head", "qkv_proj", "o_proj"]
    x = torch.randn(3, 512).bfloat16()
    bias = torch.randn(4096).bfloat16()
    for name in ("lm_head", "qkv_proj", "o_proj"):
        layer = layers[name]
        assert torch.equal(layer.quant_method.apply(layer, x), F.linear(x, dense[name]))
    assert torch.equal(
        layers["o_proj"].quant_method.apply(layers["o_proj"], x, bias), F.linear(x, dense["o_proj"], bias)
    )
    strided = torch.randn(3, 520).bfloat16()[:, 4:516]
    assert torch.equal(
        layers["o_proj"].quant_method.apply(layers["o_proj"], strided), F.linear(strided, dense["o_proj"])
    )
    assert (layers["o_proj"].weight.numel() == 0) is free and type(layers["o_proj"].quant_method) is W12LinearMethod
    head = layers["lm_head"]
    assert type(head.quant_method) is W12HeadMethod and torch.equal(head.weight, dense["lm_head"]), "drafters read it"
    many = torch.randn(65, 512).bfloat16()
    if not free:  # which of the two multiplied: spoil the one
        layers["o_proj"].weight.zero_()
    found = layers["o_proj"].quant_method.apply(layers["o_proj"], many)
    assert torch.equal(found, F.linear(many, dense["o_proj"])) is free, "above 64 rows the BF16 weight, where it stays"
    assert torch.equal(
        layers["o_proj"].quant_method.apply(layers["o_proj"], many[:64]), F.linear(many[:64], dense["o_proj"])
    )
    tokens = torch.tensor([5, 7])
    assert torch.equal(head.quant_method.embedding(head, tokens), dense["lm_head"][tokens])


def test_names_choose_and_a_block_drafter_keeps_what_it_slices() -> None:
    assert swap(model(), lambda name: name == "o_proj") == ["o_proj"]

    class DFlashDraftModel(nn.ModuleDict):
        pass

    assert swap(DFlashDraftModel(dict(model().items())), lambda name: True) == ["lm_head", "o_proj"]


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sglang_plugin.VARIABLE, raising=False)
    register()  # would fail to import SGLang otherwise
    monkeypatch.setenv(sglang_plugin.VARIABLE, ".")
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        register()


@pytest.mark.parametrize("free", [False, True])
def test_the_experiment_sets_the_variables_of_the_w12_servers_only(monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
    monkeypatch.setenv(sglang_plugin.FREE, "1")  # of the caller's shell: the option alone decides
    of = {name: sglang_serving.environment_of(name, free) for name in ("dflash", "dflash w12")}
    assert sglang_plugin.VARIABLE not in of["dflash"] and sglang_plugin.FREE not in of["dflash"]
    assert of["dflash w12"][sglang_plugin.VARIABLE] == "."
    assert of["dflash w12"].get(sglang_plugin.FREE) == ("1" if free else None)
    assert of["dflash"]["PATH"] == of["dflash w12"]["PATH"]


def test_the_entry_point_leads_here() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["sglang.srt.plugins"].values()
    module, _, name = target.partition(":")
    assert getattr(import_module(module), name) is register
