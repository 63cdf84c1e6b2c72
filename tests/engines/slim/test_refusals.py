"""Checkpoints that load and would be served wrong: each is refused at the start, with code 2 and one line. And none that is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slim_engine import values
from slim_engine.agreement import check_drafter, check_target
from slim_engine.config import target_config
from slim_engine.server import main as server_main

from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model

NAN, INF = float("nan"), float("inf")
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but the weights hold 4 layers"),
    ({"num_hidden_layers": 5}, "num_hidden_layers is 5, but the weights hold 4 layers"),
    ({"num_hidden_layers": 10**15}, "from 1 to 1000"),
    *[({"num_hidden_layers": v}, "num_hidden_layers is") for v in (0, -1, True, 4.0, None)],
    *[({"rms_norm_eps": v}, "rms_norm_eps is") for v in (NAN, INF, 0, -1e-5, "1e-5", None, True)],
    *[({"rope_theta": v}, "rope_theta is") for v in (NAN, INF, 0, -1.0, "1e4", None)],
    ({"rope_theta": 10**400}, "wrong kind"),
    ({"num_attention_heads": 3}, "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_key_value_heads": 4}, "k_proj.weight has shape (16, 32), config.json says (32, 32)"),
    ({"num_attention_heads": 6, "head_dim": None}, "hidden_size 32 is no multiple of num_attention_heads 6"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"head_dim": 16}, "has shape"),
    ({"vocab_size": 261}, "has shape (260, 32), config.json says (261, 32)"),
    ({"intermediate_size": 49}, "has shape"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act gelu_pytorch_tanh"),
    ({"hidden_act": None}, "hidden_act None"),
    *[
        ({"rope_scaling": {"type": kind, "factor": 2.0}}, f"rope type {kind}")
        for kind in ("linear", "dynamic", "longrope")
    ],
    ({"rope_scaling": {"factor": 2.0}}, "rope type unnamed"),
    ({"rope_scaling": [1]}, "rope_scaling is [1], not an object"),
    ({"rope_scaling": {**_LLAMA3, "factor": 0.5}}, "below 1"),
    ({"rope_scaling": {**_LLAMA3, "factor": NAN}}, "factor is nan"),
    ({"rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0}}, "not above low_freq_factor"),
    ({"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "disagree"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "of each layer type are not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": 8}, "sliding windows"),
    ({"layer_types": ["full_attention"]}, "not a list of 4"),
    ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
]
DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 1, "layer_types": None}, "but the weights hold 2 layers"),
    ({"num_hidden_layers": 3, "layer_types": None}, "but the weights hold 2 layers"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    ({"rope_theta": -1}, "rope_theta is -1"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 32}}, "rope type yarn"),
    ({"hidden_act": "relu"}, "hidden_act relu"),
    ({"attention_bias": True}, "attention_bias"),
    ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
    ({"layer_types": ["full_attention"]}, "not a list of 2"),
    ({"layer_types": []}, "not a list of 2"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types holds 'linear_attention'"),
    ({"layer_types": "full_attention"}, "not a list of 2"),
    ({"layer_types": None, "use_sliding_window": True, "sliding_window": 8}, "use_sliding_window needs layer_types"),
    *[
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": v}, "sliding_window is")
        for v in (0, -8, 2.5, True)
    ],
    ({"is_causal": "no"}, "is_causal is 'no'"),
    *[({"block_size": v}, "block_size is") for v in (0, 1, -8, 33, 10**9, 8.0, "8", True)],
    *[
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": taps}}, "target_layer_ids is")
        for taps in ([-1, 0, 1], [0, 1, 4], [0, 1, 2.0], [0, 1, True], [], "012", {"0": 1})
    ],
    ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}}, "fc.weight has shape (32, 96)"),
    *[
        ({"dflash_config": {"mask_token_id": v, "target_layer_ids": [0, 1, 2]}}, "mask_token_id is")
        for v in (None, -1, 260, 2.0, "3", True)
    ],
    *[
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 2], name: v}}, f"{name} is")
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        for v in (0, -1.0, NAN, INF, "1")
    ],
    ({"dflash_config": [3]}, "dflash_config is [3], not an object"),
    ({"num_target_layers": 5}, "the target has 32, 260, 4"),
]


def _changed(folder: Path, change: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


def _refused(capsys: pytest.CaptureFixture[str], target: Path, drafter: Path | str = "none") -> str:
    """What the server says as it declines to start."""
    assert server_main(["--target", str(target), "--drafter", str(drafter), "--port", "0", "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("slim: ") and said.count("\n") == 1, said
    assert any(word in said for word in ("mend", "fetch", "give", "remove", "set", "add")), f"no remedy: {said}"
    return said


@pytest.mark.parametrize(("change", "words"), TARGETS)
def test_a_target_with_a_wrong_value(
    tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in _refused(capsys, _changed(make_tiny_model(tmp_path / "t"), change))


@pytest.mark.parametrize(("change", "words"), DRAFTERS)
def test_a_drafter_with_a_wrong_value(
    llama: Path, tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in _refused(capsys, llama, _changed(make_tiny_drafter(tmp_path / "d", llama), change))


@pytest.mark.parametrize("tokens", [-1, 260, "2", 2.5, [2, 999]])
def test_an_end_that_no_token_can_be(tmp_path: Path, tokens: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "t")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    assert "eos_token_id is" in _refused(capsys, folder)


def _with(folder: Path, name: str, tensor: torch.Tensor, file: str = "model.safetensors") -> Path:
    held = load_file(folder / file) if (folder / file).exists() else {}
    save_file(held | {name: tensor.contiguous()}, folder / file)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.self_attn.q_norm.weight",
        "model.embed_norm.weight",
    ],
)
def test_a_tensor_that_nobody_asks_for(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, _with(make_tiny_model(tmp_path / "t"), name, torch.ones(8).bfloat16()))
    assert f"nothing in config.json asks for {name} of model.safetensors" in said


def test_the_same_tensor_in_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _with(make_tiny_model(tmp_path / "t"), "model.norm.weight", torch.ones(32).bfloat16(), "more.safetensors")
    assert "model.norm.weight is both in model.safetensors and in more.safetensors" in _refused(capsys, folder)


def test_a_head_of_its_own_in_a_tied_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "t")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    check_target(_with(folder, "lm_head.weight", embedding), target_config(folder))  # many published ones hold it twice
    _with(folder, "lm_head.weight", embedding * 2)
    assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in _refused(capsys, folder)


def test_copies_of_the_targets_matrices_in_a_drafter(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, theirs = make_tiny_drafter(tmp_path / "d", qwen3), load_file(qwen3 / "model.safetensors")
    config = target_config(qwen3)
    _with(folder, "embed_tokens.weight", theirs["model.embed_tokens.weight"].float())
    _with(folder, "lm_head.weight", theirs["lm_head.weight"])
    check_drafter(folder, qwen3, config)
    _with(folder, "lm_head.weight", theirs["model.embed_tokens.weight"])
    assert "lm_head.weight is not the target's" in _refused(capsys, qwen3, folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": _LLAMA3},
        {"rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 4},
        {"num_key_value_heads": 2, "partial_rotary_factor": 1.0, "mlp_bias": None},
        {"rms_norm_eps": 1e-8, "eos_token_id": [2, 3], "pretraining_tp": 1, "quantization_config": None},
    ],
)
def test_what_published_targets_carry_is_served(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = _changed(make_tiny_model(tmp_path / "t"), change)
    _with(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    check_target(folder, target_config(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048, "use_sliding_window": True},
        {"block_size": 16, "is_causal": None, "tie_word_embeddings": False},
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": None}, "target_layer_ids": [2, 0, 2]},
        {"layer_types": None, "use_sliding_window": False, "sliding_window": None, "num_target_layers": None},
    ],
)
def test_what_published_drafters_carry_is_served(llama: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    check_drafter(_changed(make_tiny_drafter(tmp_path / "d", llama), change), llama, target_config(llama))


def test_the_shipped_drafter_fits_its_target(tmp_path: Path) -> None:
    """Its target by the sizes that SmolLM2-135M is published with."""
    published = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    published |= {"intermediate_size": 1536, "vocab_size": 49152, "rope_theta": 1e5, "max_position_embeddings": 8192}
    target = _changed(make_tiny_model(tmp_path / "t"), published | {"head_dim": 64, "rope_scaling": None})
    drafter = Path(__file__).parents[3] / "deployments" / "cpu_c1_smollm2-135m_dflash" / "drafter"
    check_drafter(drafter, target, target_config(target))


_ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(_ANYTHING, st.integers(-3, 3), st.integers(0, 3))
def test_a_whole_number_is_one_in_its_range(value: Any, low: int, width: int) -> None:
    right = isinstance(value, int) and not isinstance(value, bool) and value in range(low, low + width + 1)
    if right:
        assert values.whole(value, "n", low, low + width) == value
    else:
        with pytest.raises(ValueError, match="^n is "):
            values.whole(value, "n", low, low + width)


@given(_ANYTHING)
def test_a_positive_number_is_finite_and_above_zero(value: Any) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < INF
    if right:
        assert values.positive(value, "x") == value
    else:
        with pytest.raises(ValueError, match="^x is "):
            values.positive(value, "x")
