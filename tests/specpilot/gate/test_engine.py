"""The gate on a real engine with a tiny random model; transformers is the independent source of log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specpilot.contracts import Candidate, Claim, Reason
from specpilot.evaluation.legs import run_leg
from specpilot.gate.diffcheck import check_diff
from specpilot.gate.forcing import force
from specpilot.gate.hidden import eos_token_ids, run_hidden_pass
from specpilot.gate.policy import policy_of
from specpilot.gate.records import HiddenPass
from specpilot.gate.selftest import SelfTestContext, make_bench, require_sound, self_test
from specpilot.gate.verdict import judge

CHEATS = ["evaluator-edit", "lossy-accept", "token-accounting"]


def test_calibration_on_the_reference(context: SelfTestContext) -> None:
    calibration = context.calibration
    assert calibration.positions == 6 * 32
    # float32 against float32: rounding moves a margin by far less than the floor of 0.02 nats that the deployment sets.
    assert calibration.epsilon == 0.02
    assert 0.0 < calibration.gap_quantiles["margin_shift_max"] < 1e-3
    assert calibration.near_tie_rate_limit >= 0.01
    assert "concurrency 1 and 4" in calibration.method


def test_forcing_agrees_with_transformers(context: SelfTestContext) -> None:
    from transformers import AutoModelForCausalLM

    prompts = context.pool.take("tuning", 2)
    leg = run_leg(context.reference, prompts, concurrency=1, max_new_tokens=24, side="reference")
    model = AutoModelForCausalLM.from_pretrained(context.models.target_dir, dtype=torch.float32)
    for answer in leg.generations:
        broken = list(answer.output_ids)
        broken[10] = (broken[10] + 1) % 260
        ids = [*answer.prompt_ids, *broken]
        start = len(answer.prompt_ids)
        with torch.inference_mode():
            logp = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)[start - 1 : -1]
        gaps = logp.max(-1).values - logp[torch.arange(len(broken)), torch.tensor(broken)]
        scored = context.reference.client.score(ids, start)
        assert [p.gap for p in scored] == pytest.approx(gaps.tolist(), abs=2e-4)
        assert [p.top_token for p in scored] == logp.argmax(-1).tolist()
        tally = force(context.reference.client, [answer.model_copy(update={"output_ids": broken})], 0.02)
        assert tally.sequences[0].first_violation == 10
        assert tally.violations == int((gaps > 0.02).sum())
        assert tally.exact == int((gaps == 0.0).sum())


def test_planted_cheats_are_rejected_and_the_unchanged_engine_passes(context: SelfTestContext) -> None:
    told: list[str] = []
    begun: list[str] = []
    told_of = replace(context, on_outcome=lambda outcome: told.append(outcome.cheat), doing=begun.append)
    result = self_test(told_of, CHEATS)
    assert sorted(told) == sorted(CHEATS)
    assert begun[-2:] == [
        "self-test: the unchanged engine as a candidate; it must pass",
        "self-test: 3 planted cheats, 2 at a time",
    ]
    assert [(o.cheat, o.got) for o in result.outcomes] == [
        ("evaluator-edit", Reason.outside_editable),
        ("lossy-accept", Reason.token_mismatch),
        ("token-accounting", Reason.accounting_mismatch),
    ]
    assert [(o.caught, o.got) for o in result.honest] == [(True, None)], result.honest[0].evidence
    assert result.passed
    require_sound(result)
    # Nothing is left behind.
    assert not [p for p in context.workspace.worktrees.iterdir() if p.name.startswith(("cheat-", "self-test"))]


def test_an_honest_change_passes(context: SelfTestContext) -> None:
    """Other prefill chunks, other weight layout, fewer verified drafts: different rounding and rounds, same tokens."""
    tree = context.workspace.worktree("honest-change", context.workspace.first_commit)
    tunables = tree / "tunables.toml"
    text = tunables.read_text()
    for old, new in (
        ("prefill_chunk = 256", "prefill_chunk = 16"),
        ("pack_rows = 8", "pack_rows = 1"),
        ("verify_drafts = 15", "verify_drafts = 3"),
    ):
        assert old in text
        text = text.replace(old, new)
    tunables.write_text(text)
    commit = context.workspace.commit_all("honest-change", "Other tunables")
    claim = Claim(component="host", hypothesis="Smaller chunks", counters=["rounds"])
    candidate = Candidate(
        attempt_id="h",
        worker="w",
        base_commit=context.workspace.first_commit,
        commit=commit,
        branch="specpilot/h",
        claim=claim,
    )
    policy = policy_of({"hidden_prompts": 2, "hidden_tokens": 24, "natural_stop_prompts": 2, "natural_tokens": 24})
    diff = check_diff(tree, candidate.base_commit, commit, context.spec.editable, policy)
    with make_bench(context).server("honest-change", tree, commit) as server:
        hidden = run_hidden_pass(server, context.pool, policy, eos_ids=eos_token_ids(context.models.target_dir))
    verdict = judge(
        candidate,
        [],
        None,
        hidden=hidden,
        reference_factory=lambda: context.reference,
        calibration=context.calibration,
        policy=policy,
        diff=diff,
        target_sha256=context.models.target_sha256,
    )
    assert verdict.passed, verdict.detail
    assert hidden.eos_token_ids == [2]
    assert hidden.block_size == 8
    assert [leg.concurrency for leg in hidden.legs] == [1, 4]
    # 2 answers alone, 4 together, 4 of the repeat probe, and 2 that may stop by themselves.
    assert 10 * 24 < verdict.positions <= 12 * 24
    assert verdict.violations == 0
    assert HiddenPass.model_validate_json(hidden.model_dump_json()) == hidden
