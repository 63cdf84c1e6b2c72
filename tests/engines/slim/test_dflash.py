"""DFlash against a plain float64 implementation of the published architecture, written from its description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slim_engine.config import default_taps, drafter_config, target_config
from slim_engine.counters import COUNTERS
from slim_engine.errors import CheckpointError
from slim_engine.request import Request
from slim_engine.sampling import SamplingParams
from transformers import AutoModelForCausalLM

from tests.engines.slim.support import engine, run
from tests.helpers.tiny_model import MASK_ID, make_tiny_drafter

PROMPT = [40, 41, 7, 9, 100, 30, 222, 15, 60, 61]

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "three layers, scaled": {
        "layers": 3,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [2, 0], "input_embedding_scale": 0.5},
        "target_layer_ids": [2, 0],
    },
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "sliding, not causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
    "causal": {"is_causal": True},
}


def _norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def _rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    d = x.shape[-1]
    angle = positions.double()[:, None] * theta ** (-torch.arange(0, d, 2).double() / d)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _reference(folder: Path, embedding: torch.Tensor, taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """Hidden states of one block [B, H] after `taps` [n, T*H] committed tokens, everything recomputed from nothing."""
    config = json.loads((folder / "config.json").read_text())
    w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    nested, eps = config["dflash_config"], config["rms_norm_eps"]
    heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    n, block = len(taps), config["block_size"]
    context = _norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embedding[[anchor] + [nested["mask_token_id"]] * (block - 1)] * nested.get("input_embedding_scale", 1.0)
    positions = torch.arange(n + block)
    for i in range(config["num_hidden_layers"]):
        p = f"layers.{i}."
        y = _norm(x, w[p + "input_layernorm.weight"], eps)
        both = torch.cat([context, y])
        q = (y @ w[p + "self_attn.q_proj.weight"].T).view(block, heads, d)
        k = (both @ w[p + "self_attn.k_proj.weight"].T).view(n + block, kv_heads, d)
        v = (both @ w[p + "self_attn.v_proj.weight"].T).view(n + block, kv_heads, d)
        q = _rope(_norm(q, w[p + "self_attn.q_norm.weight"], eps), positions[n:], config["rope_theta"])
        k = _rope(_norm(k, w[p + "self_attn.k_norm.weight"], eps), positions, config["rope_theta"])
        sliding = config["layer_types"][i] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        out = torch.zeros(block, heads, d, dtype=torch.float64)
        for row in range(block):
            for h in range(heads):
                scores = (k[:, h // (heads // kv_heads)] @ q[row, h]) / d**0.5
                for key in range(n + block):
                    distance = n + row - key
                    far = sliding and (distance >= config["sliding_window"] or -distance >= config["sliding_window"])
                    if far or (causal and distance < 0):
                        scores[key] = -torch.inf
                out[row, h] = scores.softmax(0) @ v[:, h // (heads // kv_heads)]
        x = x + out.reshape(block, -1) @ w[p + "self_attn.o_proj.weight"].T
        y = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        up = y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], eps)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [[10], [4, 1, 5]])
def test_block_matches_float64(llama: Path, tmp_path: Path, shape: str, pieces: list[int]) -> None:
    """Context features arrive in pieces, as after prefill chunks and rounds; a stale block stands behind the context each time."""
    folder = make_tiny_drafter(tmp_path / "d", llama, **SHAPES[shape])
    loaded = engine(llama, folder)
    drafter: Any = loaded.models.drafter
    oracle = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)
    request = Request("r", PROMPT, SamplingParams(), (), lambda c: None)
    request.output_ids.append(77)
    with torch.inference_mode():
        states = oracle(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[t + 1][0] for t in drafter.tap_ids], -1)
        drafter.start(request)
        for part in taps.float().split(pieces):
            drafter.observe(request, part)
            drafter.propose([request], [3])
        got = drafter._forward([request], [drafter.config.block_size])
    want = _reference(folder, oracle.get_input_embeddings().weight.detach(), taps, 77)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        proposal = drafter.propose([request], [drafter.max_drafts])[0]
    head = oracle.get_output_embeddings().weight.detach()
    assert proposal.tokens == (want[1:] @ head.T).argmax(-1).tolist()


def test_context_is_projected_once_per_committed_token(llama: Path, drafter: Path) -> None:
    loaded = engine(llama, drafter)
    rows: list[int] = []
    fc = loaded.models.drafter.fc  # type: ignore[union-attr]
    loaded.models.drafter.fc = lambda x: rows.append(len(x)) or fc(x)  # type: ignore[union-attr]
    request = run(loaded, [PROMPT], max_new_tokens=30, ignore_eos=True)[0]
    before_last_round = len(PROMPT) + 30 - 1
    assert sum(rows) <= before_last_round
    assert sum(rows) >= before_last_round - loaded.models.drafter.max_drafts - 1  # type: ignore[union-attr]
    assert request.rounds == COUNTERS.get("rounds")


def test_softcap_and_multiplier_shape_the_draft_logits(llama: Path, tmp_path: Path) -> None:
    nested = {
        "mask_token_id": MASK_ID,
        "target_layer_ids": [0, 2, 2],
        "output_multiplier": 0.25,
        "final_logit_softcapping": 5.0,
    }
    folder = make_tiny_drafter(tmp_path / "d", llama, dflash_config=nested)
    loaded = engine(llama, folder)
    hidden = torch.randn(3, 32)
    with torch.inference_mode():
        raw = loaded.models.head.logits(hidden)
        got = loaded.models.drafter._head.logits(hidden)  # type: ignore[union-attr]
    torch.testing.assert_close(got, torch.tanh(raw * 0.25 / 5.0) * 5.0)


@pytest.mark.parametrize(
    ("layers", "depth", "taps"),
    [(5, 36, [1, 9, 17, 25, 33]), (5, 40, [1, 10, 19, 28, 37]), (5, 64, [1, 16, 31, 46, 61]), (1, 30, [15])],
)
def test_default_taps_are_the_published_ones(layers: int, depth: int, taps: list[int]) -> None:
    assert default_taps(layers, depth) == taps


def test_nested_keys_win_over_top_level(llama: Path, tmp_path: Path) -> None:
    nested = {"mask_token_id": 9, "target_layer_ids": [1], "block_size": 6}
    folder = make_tiny_drafter(tmp_path / "d", llama, mask_token_id=5, dflash_config=nested, target_layer_ids=[1])
    config = drafter_config(folder, target_config(llama))
    assert (config.mask_token_id, config.block_size, config.target_layer_ids) == (9, 6, (1,))
    assert config.causal == (False, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not served"),
        ({"hidden_size": 64}, "the target has 32"),
        ({"num_target_layers": 9}, "9 layers"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": 999}}, "mask_token_id is 999"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [4]}},
            "target_layer_ids is 4, not a whole number from 0 to 3",
        ),
        ({"block_size": 1}, "block_size is 1,"),
    ],
)
def test_wrong_drafters_are_refused(llama: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = make_tiny_drafter(tmp_path / "d", llama)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=words):
        drafter_config(folder, target_config(llama))
