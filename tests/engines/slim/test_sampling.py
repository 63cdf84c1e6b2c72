"""Sampling: filters by hand-computed cases, and rejection sampling by its distribution."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from slim_engine.sampling import SamplingParams, accept_sampled, draw, probabilities
from transformers import AutoModelForCausalLM

from tests.engines.slim.support import engine, run

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0]])


def test_temperature_is_a_division() -> None:
    got = probabilities(LOGITS, SamplingParams(temperature=0.5))
    torch.testing.assert_close(got, torch.softmax(LOGITS * 2, -1))


def test_top_k_keeps_k() -> None:
    got = probabilities(LOGITS[:1], SamplingParams(temperature=1.0, top_k=2))[0]
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(got, torch.tensor([e / (e + 1), 1 / (e + 1), 0.0, 0.0]))


def test_top_p_keeps_the_smallest_nucleus() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    got = probabilities(probs.log(), SamplingParams(temperature=1.0, top_p=0.7))[0]
    torch.testing.assert_close(got, torch.tensor([0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75]))
    only = probabilities(probs.log(), SamplingParams(temperature=1.0, top_p=1e-9))[0]
    torch.testing.assert_close(only, torch.tensor([0.0, 1.0, 0.0, 0.0]))


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=1)])
def test_greedy_spellings(params: SamplingParams) -> None:
    assert params.greedy


def test_draw_never_returns_an_impossible_token() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.0, 1e-30, 0.0, 3.0, 0.0])
    assert {draw(weights, generator) for _ in range(300)} == {3}
    assert {draw(torch.tensor([0.0, 0.2]), generator) for _ in range(20)} == {1}


@pytest.mark.parametrize("kind", ["drawn from q", "fixed drafts"])
def test_rejection_sampling_gives_the_target_distribution(kind: str) -> None:
    """Two drafts over four tokens: the joint distribution of the first committed tokens is p's, however bad q is."""
    generator = torch.Generator().manual_seed(5)
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    q = torch.tensor([[0.1, 0.1, 0.2, 0.6], [0.7, 0.1, 0.1, 0.1]])
    counts = torch.zeros(4)
    seconds = torch.zeros(4)
    runs = 6000
    for _ in range(runs):
        drafts = [draw(row, generator) for row in q] if kind == "drawn from q" else [1, 0]
        run_ = accept_sampled(drafts, q if kind == "drawn from q" else None, p, generator)
        counts[run_[0]] += 1
        if len(run_) > 1:
            seconds[run_[1]] += 1
    assert counts[3] == 0
    assert chisquare(counts[:3].numpy(), (p[0, :3] * runs).numpy()).pvalue > 1e-3
    expected = p[1] * seconds.sum()
    assert chisquare(seconds.numpy(), expected.numpy() * (seconds.sum() / expected.sum()).item()).pvalue > 1e-3


def test_equal_distributions_accept_everything() -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    for _ in range(50):
        drafts = [draw(row, generator) for row in p[:2]]
        assert accept_sampled(drafts, p[:2], p, generator)[:2] == drafts


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_distribution_that_is_not_finite_is_refused(bad: float) -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.full((3, 4), 0.25)
    broken = p[:2].clone()
    broken[1, 3] = bad
    with pytest.raises(ValueError, match="drafter's distribution q is not finite at position 1"):
        accept_sampled([0, 1], broken, p, generator)
    with pytest.raises(ValueError, match="target's distribution p is not finite at position 1"):
        accept_sampled([0], None, broken, generator)


@pytest.mark.parametrize("method", ["none", "dflash", "ngram"])
def test_engine_samples_the_targets_distribution(llama: Path, drafter: Path, method: str) -> None:
    """First three tokens of 600 seeded requests against probabilities that transformers gives (top 3 of 260 tokens, T = 2)."""
    prompt = [7, 9, 11, 9, 11]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    expected: dict[tuple[int, ...], float] = {}
    with torch.inference_mode():

        def extend(prefix: tuple[int, ...], mass: float) -> None:
            if len(prefix) == 3:
                expected[prefix] = mass
                return
            best = (model(torch.tensor([[*prompt, *prefix]])).logits[0, -1] / 2.0).topk(3)
            for token, chance in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
                extend((*prefix, token), mass * chance)

        extend((), 1.0)
    loaded = engine(
        llama, {"none": "none", "ngram": "ngram", "dflash": str(drafter)}[method], max_requests=100, ngram_min=1
    )
    runs = 600
    outputs = run(
        loaded, [prompt] * runs, seeds=range(runs), max_new_tokens=3, ignore_eos=True, temperature=2.0, top_k=3
    )
    seen = {key: 0 for key in expected}
    for request in outputs:
        seen[tuple(request.output_ids)] += 1
    big = [k for k in expected if expected[k] * runs >= 5]
    observed = [seen[k] for k in big] + [sum(seen[k] for k in expected if k not in big)]
    wanted = [expected[k] * runs for k in big] + [sum(expected[k] for k in expected if k not in big) * runs]
    if wanted[-1] < 5:
        observed = observed[:-2] + [observed[-2] + observed[-1]]
        wanted = wanted[:-2] + [wanted[-2] + wanted[-1]]
    assert chisquare(observed, [w * runs / sum(wanted) for w in wanted]).pvalue > 1e-3


def test_seeds_repeat_and_differ(llama: Path, drafter: Path) -> None:
    loaded = engine(llama, drafter)
    first, again, other = (
        [
            r.output_ids
            for r in run(loaded, [[5, 6, 7]] * 2, seeds=s, max_new_tokens=20, ignore_eos=True, temperature=1.0)
        ]
        for s in ([1, 2], [1, 2], [3, 4])
    )
    assert first == again
    assert len({tuple(o) for o in itertools.chain(first, other)}) == 4
