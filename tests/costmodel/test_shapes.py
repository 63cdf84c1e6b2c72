"""Byte and parameter counts against the published ones (facts sections 0, 1.4, 3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpilot.costmodel import W12_BITS, CostModelError, drafter_shape, target_shape
from tests.costmodel.published import (
    MUSE_DFLASH2,
    MUSE_GLIMMER_30B,
    QWEN3_8B,
    QWEN38_27B,
    QWEN38_DFLASH2,
    SMOL_DFLASH,
    SMOLLM2_135M,
)


@pytest.mark.parametrize(
    ("config", "layer_b", "head_b", "total_b", "read_gb", "w12_gb"),
    [
        (QWEN38_27B, 24.353, 1.271, 26.896, 51.25, 38.5),
        (MUSE_GLIMMER_30B, 25.165, 1.345, 27.855, 53.02, 39.9),
    ],
)
def test_reproduces_the_published_table(config, layer_b, head_b, total_b, read_gb, w12_gb):
    shape = target_shape(config)
    assert shape.layer_params / 1e9 == pytest.approx(layer_b, abs=5e-4)
    assert shape.head_params / 1e9 == pytest.approx(head_b, abs=5e-4)
    assert shape.total_params / 1e9 == pytest.approx(total_b, abs=1e-3)
    assert shape.read_bytes(16) / 1e9 == pytest.approx(read_gb, abs=5e-3)
    assert shape.read_bytes(W12_BITS) / 1e9 == pytest.approx(w12_gb, abs=0.05)


def test_hybrid_layer_sizes():
    shape = target_shape(QWEN38_27B)
    by_name = {m.name: m for m in shape.matrices}
    gdn = sum(by_name[n].params // 48 for n in ("gdn_in", "gdn_in_a_b", "gdn_conv", "gdn_gates", "gdn_out"))
    attention = sum(by_name[n].params // 16 for n in ("attention_qkv_gate", "attention_o"))
    assert (gdn + 128) / 1e6 == pytest.approx(115.88, abs=5e-3)
    assert attention / 1e6 == pytest.approx(104.86, abs=5e-3)
    assert by_name["attention_qkv_gate"].n == 12288 + 2 * 1024 and by_name["gdn_in"].n == 10240 + 6144
    assert shape.recurrent[0].state_bytes / 1e6 == pytest.approx(151, abs=0.5)
    assert shape.attention[0].layers == 16


def test_muse_sliding_layers():
    full, sliding = target_shape(MUSE_GLIMMER_30B).attention
    assert (full.layers, full.window) == (13, None)
    assert (sliding.layers, sliding.window) == (39, 2048)
    assert sliding.visible(10_000) == 2048 and full.visible(10_000) == 10_000


MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip
"""Mistral-7B-v0.1: every layer sees 4096 tokens, and no `layer_types` says so."""


def test_a_window_without_layer_types_means_what_the_family_means_by_it():
    (layer,) = target_shape(MISTRAL).attention
    assert (layer.layers, layer.window, layer.visible(10_000)) == (32, 4096, 4096)
    (layer,) = target_shape({**MISTRAL, "sliding_window": None}).attention  # v0.2 and later
    assert (layer.layers, layer.window) == (32, None)
    (layer,) = target_shape({**MISTRAL, "model_type": "llama"}).attention  # knows no window
    assert layer.window is None
    full, sliding = target_shape({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"] * 16}).attention
    assert (full.layers, sliding.layers, sliding.window) == (16, 16, 4096)


def test_qwen_slides_only_where_it_is_told_to():
    qwen = {**MISTRAL, "model_type": "qwen2", "max_window_layers": 28, "use_sliding_window": False}
    (layer,) = target_shape(qwen).attention
    assert (layer.layers, layer.window) == (32, None)
    full, sliding = target_shape({**qwen, "use_sliding_window": True}).attention
    assert (full.layers, full.window, sliding.layers, sliding.window) == (28, None, 4, 4096)


def test_smollm2_and_qwen3_parameter_counts():
    assert target_shape(SMOLLM2_135M).total_params == 134_515_008  # the published checkpoint's count
    assert target_shape(QWEN3_8B).total_params == 8_190_735_360  # the published checkpoint's count


def test_dflash2_parameter_count_and_streamed_part():
    shape = drafter_shape(QWEN38_DFLASH2)
    assert shape.total_params / 1e9 == pytest.approx(1.9244, abs=5e-5)
    assert shape.streamed_params / 1e9 == pytest.approx(1.80, abs=5e-3)
    head_gb = 248320 * 5120 * 2 / 1e9
    assert shape.streamed_params * 2 / 1e9 + head_gb == pytest.approx(6.1, abs=0.05)
    assert shape.block_size == 8  # dflash_config wins over the top level
    muse = drafter_shape(MUSE_DFLASH2)
    assert muse.total_params / 1e9 == pytest.approx(2.77, abs=0.01)


def test_dflash_defaults_and_taps():
    shape = drafter_shape(SMOL_DFLASH)
    assert shape.family == "dflash" and shape.taps == 3 and shape.codebook_params == 0
    fc = next(m for m in shape.matrices if m.scope == "draft.fc")
    assert (fc.n, fc.k) == (576, 3 * 576)
    without = {k: v for k, v in SMOL_DFLASH.items() if k != "block_size"}
    assert drafter_shape(without).block_size == 16


def test_reads_folders_and_files(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    assert target_shape(tmp_path) == target_shape(tmp_path / "config.json") == target_shape(SMOLLM2_135M)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "known: llama"),
        ({"hidden_size": None}, "`hidden_size` must be a positive integer"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, "1 entries for 30 layers"),
    ],
)
def test_bad_target_configs_name_the_key(change, words):
    with pytest.raises(CostModelError, match=words):
        target_shape({**SMOLLM2_135M, **change})


def test_bad_files_name_the_path(tmp_path: Path):
    with pytest.raises(CostModelError, match="does not exist"):
        target_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CostModelError, match="not JSON"):
        target_shape(tmp_path)
    with pytest.raises(CostModelError, match="not a DFlash drafter"):
        drafter_shape({**SMOL_DFLASH, "architectures": ["LlamaForCausalLM"]})
