"""Log-probabilities of prompts and outputs against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slim_engine.request import LogprobOptions
from slim_engine.round import token_logprobs
from transformers import AutoModelForCausalLM

from tests.engines.slim.support import engine, run

TOKENS = [
    7,
    99,
    200,
    31,
    31,
    5,
    250,
    64,
    12,
    180,
    3,
    77,
] * 12  # longer than a prefill chunk and than one slice of scored rows


def _logp(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("start", [0, 31, 142, 143])
@pytest.mark.parametrize("chunk", [32, 256])
def test_prompt_scores(llama: Path, start: int, chunk: int) -> None:
    """max_new_tokens 0: positions start + 1 .. end, each given everything before it."""
    loaded = engine(llama, prefill_chunk=chunk)
    request = run(loaded, [TOKENS], LogprobOptions(start, 3), max_new_tokens=0)[0]
    logp = _logp(llama, TOKENS)
    assert request.finish == {"type": "length", "length": 0}
    assert request.output_ids == []
    scored = request.input_logprobs
    assert [e.token_id for e in scored] == TOKENS[start + 1 :]
    for position, entry in zip(range(start, len(TOKENS) - 1), scored, strict=True):
        assert entry.logprob == pytest.approx(float(logp[position, entry.token_id]), abs=2e-4)
        assert entry.top[0][0] == pytest.approx(float(logp[position].max()), abs=2e-4)
        assert entry.top[0][1] == int(logp[position].argmax())
        assert [v for v, _ in entry.top] == sorted((v for v, _ in entry.top), reverse=True)


def test_scoring_with_a_drafter_loaded_starts_no_draft(llama: Path, drafter: Path) -> None:
    loaded = engine(llama, drafter)
    assert run(loaded, [TOKENS], LogprobOptions(0, 0), max_new_tokens=0)[0].draft_state is None
    alone = run(engine(llama), [TOKENS], LogprobOptions(0, 0), max_new_tokens=0)[0]
    assert [e.token_id for e in alone.input_logprobs] == TOKENS[1:]


@pytest.mark.parametrize("method", ["none", "dflash"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_output_logprobs_are_the_targets(llama: Path, drafter: Path, method: str, temperature: float) -> None:
    chunks: list = []
    loaded = engine(llama, drafter if method == "dflash" else "none")
    request = run(
        loaded,
        [TOKENS[:20]],
        LogprobOptions(None, 2),
        chunks,
        seeds=[3],
        max_new_tokens=25,
        ignore_eos=True,
        temperature=temperature,
    )[0]
    got = [e for c in chunks for e in c.logprobs]
    logp = _logp(llama, TOKENS[:20] + request.output_ids)
    assert [e.token_id for e in got] == request.output_ids
    for position, entry in enumerate(got, 19):
        assert entry.logprob == pytest.approx(float(logp[position, entry.token_id]), abs=5e-4)
        assert len(entry.top) == 2
    assert request.input_logprobs == []


def test_equal_alternatives_are_listed_by_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0]])
    assert [t for _, t in token_logprobs(logits, 0, [0], 3)[0].top] == [1, 2, 3]
