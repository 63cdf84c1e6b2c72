"""The target against transformers on the same random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slim_engine.counters import COUNTERS
from slim_engine.target import Segment
from transformers import AutoModelForCausalLM

from tests.engines.slim.support import engine, run
from tests.helpers.tiny_model import make_tiny_model

PROMPT = [7, 99, 200, 31, 31, 5, 250, 64, 12, 180, 3, 77]


def _oracle(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return _oracle(folder)(torch.tensor([tokens])).logits[0]


@pytest.fixture(params=["llama", "qwen3", "llama3-rope"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param != "llama3-rope":
        return request.getfixturevalue(request.param)
    made = make_tiny_model(tmp_path / "rope", tied=False)
    config = json.loads((made / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_a_sharded_checkpoint_is_the_same_model(llama: Path, tmp_path: Path) -> None:
    """Shards as transformers itself writes them."""
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-0000?-of-*.safetensors"))
    assert len(shards) > 1 and not (tmp_path / "model.safetensors").exists()
    assert sum(len(load_file(path)) for path in shards) == len(load_file(llama / "model.safetensors"))
    logits = []
    for folder in (llama, tmp_path):
        models = engine(folder).models
        with torch.inference_mode():
            hidden, _ = models.target.forward([Segment(PROMPT, models.target.pool.take())])
            logits.append(models.head.logits(hidden))
    assert torch.equal(logits[0], logits[1])


def test_logits_match_transformers(folder: Path) -> None:
    loaded = engine(folder)
    target = loaded.models.target
    with torch.inference_mode():
        hidden, _ = target.forward([Segment(PROMPT, target.pool.take())])
        got = loaded.models.head.logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, _logits(folder, PROMPT), rtol=1e-4, atol=1e-4)


def test_taps_are_the_residual_stream(folder: Path) -> None:
    with torch.inference_mode():
        states = _oracle(folder)(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        target = engine(folder).models.target
        _, taps = target.forward([Segment(PROMPT, target.pool.take())], (0, 2))
    torch.testing.assert_close(taps, torch.cat([states[1][0], states[3][0]], -1), rtol=1e-4, atol=1e-4)


def test_rows_of_several_requests_do_not_mix(folder: Path) -> None:
    prompts = [PROMPT, PROMPT[3:9], [250]]
    target = engine(folder).models.target
    with torch.inference_mode():
        together, _ = target.forward([Segment(p, target.pool.take()) for p in prompts])
        alone = [target.forward([Segment(p, target.pool.take())])[0] for p in prompts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_cache_pieces_equal_one_pass(folder: Path) -> None:
    target = engine(folder).models.target
    cache, pieces = target.pool.take(), []
    with torch.inference_mode():
        whole, _ = target.forward([Segment(PROMPT, target.pool.take())])
        for piece in (PROMPT[:5], PROMPT[5:6], PROMPT[6:]):
            target.forward([Segment([9, 9, 9], cache)])  # rejected rows: never committed, so they must leave no trace
            pieces.append(target.forward([Segment(piece, cache)])[0])
            cache.length += len(piece)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [16, 256])
def test_greedy_tokens_match_transformers(folder: Path, chunk: int) -> None:
    prompt = (PROMPT * 4)[:45]
    with torch.inference_mode():
        want = _oracle(folder).generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    got = run(engine(folder, prefill_chunk=chunk), [prompt], max_new_tokens=40, ignore_eos=True)[0]
    assert got.output_ids == want[0, 45:].tolist()
    assert COUNTERS.get("prefill_tokens") == 45 and COUNTERS.get("prefill_forwards") == -(-45 // chunk)


def test_bfloat16_decoding_stays_near_the_float32_argmax(llama: Path) -> None:
    output = run(engine(llama, compute="bfloat16"), [PROMPT], max_new_tokens=40, ignore_eos=True)[0].output_ids
    logits = _logits(llama, PROMPT + output)[len(PROMPT) - 1 : -1]
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert float(gap.max()) < 0.03 * float(logits.abs().max())
