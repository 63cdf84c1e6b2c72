"""The drafter's training code against independent formulas: attention, loss gradient, accepted length, data cleaning."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.scripts import scripts_of

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
with scripts_of(EXPERIMENTS / "train_drafter", EXPERIMENTS / "acceptance"):
    from build_prompts import Prompt as PromptLine
    from build_prompts import alternate, shuffled
    from drafter import Drafter, DrafterShape
    from evaluate import walk
    from generate import cut_loops
    from loss import HeadLoss, chunk_gradient
    from make_prompts import CODE_REQUESTS, finish_prompt, ngrams
    from plain_dflash import PlainDrafter
    from train import draw, schedule

SHAPE = DrafterShape(
    hidden=36, layers=2, intermediate=40, heads=6, kv_heads=2, head_dim=16, vocabulary=97, mask_token_id=4, tap_ids=(0, 1), block_size=5
)  # fmt: skip


def test_the_scripts_names_are_not_left_to_other_tests() -> None:
    assert not {"target", "train", "loss", "generate", "drafter", "evaluate"} & sys.modules.keys()
    assert not any("experiments" in Path(entry).parts for entry in sys.path)


def test_trained_module_drafts_what_the_plain_implementation_drafts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter = Drafter(SHAPE)
    with torch.no_grad():
        for parameter in drafter.parameters():  # BF16 values, so that saving loses nothing
            parameter.copy_(torch.randn_like(parameter).mul(0.3).bfloat16())
    drafter.save(tmp_path)
    embedding, taps, ids = torch.randn(97, 36), torch.randn(2, 30, 72), torch.randint(0, 97, (2, 30))
    anchors = torch.tensor([[0, 5, 29, 12], [1, 2, 3, 20]])
    tables = drafter.tables(64, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        states = drafter(taps, embedding[ids.gather(1, anchors)], embedding[4], anchors, tables)
    plain = PlainDrafter(tmp_path)
    for row in range(2):
        for column, anchor in enumerate(anchors[row].tolist()):
            expected = plain.draft(taps[row, :anchor], int(ids[row, anchor]), embedding, embedding)
            assert (states[row, column] @ embedding.T).argmax(-1).tolist() == expected


def test_config_has_the_published_keys(tmp_path: Path) -> None:
    Drafter(SHAPE).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 4, "target_layer_ids": [0, 1]}
    assert config["block_size"] == 5


def test_loss_gradient_equals_autograd() -> None:
    torch.manual_seed(1)
    states, head = torch.randn(6, 4, 8, requires_grad=True), torch.randn(11, 8)
    labels = torch.randint(0, 11, (6, 4))
    labels[0, 2:], labels[3] = -1, -1
    decay, mix = torch.exp(-torch.arange(4) / 4.0), torch.tensor(0.3)
    loss, hits = HeadLoss.apply(states, head, labels, decay, mix, 4, chunk_gradient)
    (got,) = torch.autograd.grad(loss, states)
    log_p = (states @ head.T).log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    valid = labels >= 0
    p = torch.where(valid, picked.exp(), 0.0).detach()
    tail = torch.stack([sum(p[:, : last + 1].prod(-1) for last in range(slot, 4)) for slot in range(4)], -1)
    weight = torch.where(valid, 0.7 * decay + 0.3 * tail, 0.0)
    expected = -(weight * picked).sum() / (valid * decay).sum()
    (want,) = torch.autograd.grad(expected, states)
    assert torch.allclose(loss, expected, atol=1e-5) and torch.allclose(got, want, atol=1e-5)
    assert torch.equal(hits, ((states @ head.T).argmax(-1) == labels) & valid)


def test_path_weight_is_the_gradient_of_expected_accepted_length() -> None:
    log_p = torch.log(torch.tensor([0.9, 0.5, 0.7])).requires_grad_()
    (gradient,) = torch.autograd.grad(log_p.cumsum(-1).exp().sum(), log_p)
    path = log_p.detach().exp().cumprod(-1)
    assert torch.allclose(gradient, path.flip(-1).cumsum(-1).flip(-1))


def test_walk_counts_rounds() -> None:
    assert walk([2, 0, 0, 0, 1, 7]) == (6, 3)  # 3 tokens, 1, then 2 (position 4 and 5)
    assert walk([0, 0, 0]) == (3, 3)
    assert walk([]) == (0, 0)


def test_anchors_stay_in_the_answer_and_labels_end_with_it() -> None:
    tokens = torch.arange(40).repeat(2, 1)
    data = {"tokens": tokens, "prompt_length": torch.tensor([10, 20]), "length": torch.tensor([30, 24])}
    ids, anchors, labels = draw(data, torch.tensor([0, 1]), 6, 8)
    assert torch.equal(ids, tokens)
    for row, (start, end) in enumerate([(10, 30), (20, 24)]):
        for anchor, line in zip(anchors[row].tolist(), labels[row].tolist(), strict=True):
            if line[0] < 0:
                assert set(line) == {-1}
                continue
            assert start <= anchor < end - 1
            assert line == [anchor + k if anchor + k < end else -1 for k in range(1, 8)]
    assert (labels[1, :, 0] >= 0).sum() == 3  # three anchors fit into an answer of four tokens


def test_loops_are_cut_and_plain_text_is_not() -> None:
    sequence = np.zeros((2, 400), dtype=np.uint16)
    sequence[0, :50], sequence[0, 50:350] = np.arange(100, 150), np.tile([7, 8, 9], 100)
    sequence[1, :300] = np.random.default_rng(0).permutation(300) + 1
    lengths = cut_loops(sequence, np.array([20, 20]), np.array([350, 300]), keep=2)
    assert lengths.tolist() == [53 + 2 * 3 + 64, 300]


def test_schedule_warms_up_and_falls_to_its_floor() -> None:
    assert schedule(0.02, 0.04, 0.1) == pytest.approx(0.5)
    assert schedule(0.04, 0.04, 0.1) == pytest.approx(1.0)
    assert schedule(1.0, 0.04, 0.1) == pytest.approx(0.1)


def test_open_seeds_become_prompts_or_are_dropped() -> None:
    head = CODE_REQUESTS[0].split("{task}")[0] + 'def f(x):\n    """'
    seed = {"kind": "code", "state": "open", "text": head, "quote": '"""', "request": CODE_REQUESTS[1]}
    prompt = finish_prompt(seed, 'Return twice the given number."""\n    return 2 * x', ended=False)
    assert prompt is not None and 'def f(x):\n    """Return twice the given number."""\n```<|im_end|>' in prompt
    assert "return 2" not in prompt
    assert finish_prompt(seed, "A docstring that never ends", ended=True) is None
    problem = {"kind": "arithmetic", "state": "open", "text": "Tom has 3 red apples", "request": "{task}"}
    assert finish_prompt(problem, " and buys 4 more. How many has he now? Answer", ended=False) is not None
    assert finish_prompt(problem, " and no question.", ended=True) is None


def test_ngrams_see_shared_wording_but_not_the_request() -> None:
    ours = CODE_REQUESTS[0].format(task="one two three four five six seven eight nine")
    other = CODE_REQUESTS[0].format(task="ten eleven twelve thirteen fourteen fifteen sixteen seventeen")
    assert not ngrams(ours, 8) & ngrams(other, 8)
    assert ngrams(ours, 8) & ngrams("x, two; three: four FIVE six seven eight nine", 8)


def test_prompt_order_depends_on_ids_alone() -> None:
    lines = [PromptLine(str(index), "a", "t") for index in range(9)]
    assert shuffled(lines) == shuffled(lines[::-1])
    mixed = alternate(lines[:6], [PromptLine("x", "b", "t"), PromptLine("y", "b", "t")])
    assert [line.source for line in mixed[:4]].count("b") == 1 and len(mixed) == 8
