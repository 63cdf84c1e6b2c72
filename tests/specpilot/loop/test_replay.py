"""`memory verify` as far as the loop answers it: intervals, fit, and a mechanism measured again on the made-up engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from specpilot.evaluation.stats import confidence_sequence
from specpilot.loop.replay import LoopReplay
from specpilot.memory import Effect, Hardware, MemoryStore
from specpilot.memory.seeding import SEED_FOLDER, read_seeds
from specpilot.paths import runs_dir
from tests.helpers.fake_server import Behaviour
from tests.specpilot.loop.setting import fake_setting, patch_between, remember

STOCK = Behaviour(round_s=0.012)
SAMPLES = [1.31, 1.27, 1.36, 1.29, 1.33, 1.30]


def effect(**changes: object) -> Effect:
    """An effect whose interval is the one of its samples at level 0.02."""
    interval = confidence_sequence([math.log(x) for x in SAMPLES], 0.02)
    fields = {
        "deployment": "d",
        "deployment_fingerprint": "f",
        "hardware": Hardware(),
        "ratio": math.exp(interval.mean),
        "low": interval.low_ratio,
        "high": interval.high_ratio,
        "samples": SAMPLES,
        "outcome": "verified",
    }
    return Effect.model_validate(fields | changes)


def test_a_stored_interval_must_follow_from_its_samples() -> None:
    check = LoopReplay().interval_problem
    honest = effect()
    assert check(honest) == ""
    assert "not centred" in check(effect(low=honest.low * 1.01))
    narrow = {"low": honest.ratio / 1.0001, "high": honest.ratio * 1.0001}
    assert "does not follow from its 6 samples" in check(effect(**narrow))
    assert check(effect(samples=SAMPLES[:2], low=0.0, high=math.inf)) == ""
    assert "open on one side" in check(effect(low=0.0))


def test_every_shipped_effect_follows_from_its_samples_and_every_patch_fits() -> None:
    seeds = {seed.mechanism.name: seed for seed in read_seeds(SEED_FOLDER)}
    loop = LoopReplay()
    assert [loop.interval_problem(e) for seed in seeds.values() for e in seed.effects] == [""] * sum(
        len(seed.effects) for seed in seeds.values()
    )
    gemm, forward = seeds["native-bf16-gemm"].mechanism, seeds["native-forward"].mechanism
    assert loop.fit([gemm, forward])[0] is True
    twice, words = loop.fit([gemm, gemm])
    assert twice is False and "the engine has it already" in words
    drifted = gemm.model_copy(update={"patch": gemm.patch.replace("\n ", "\n x", 1)})
    fits, words = loop.fit([drifted])
    assert fits is False and "does not fit the installed engine slim" in words
    elsewhere = forward.preconditions.model_copy(update={"engine": "other"})
    assert loop.fit([forward.model_copy(update={"preconditions": elsewhere})])[0] is None


def test_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds of 12 ms, 6 ms with the requirement, 3 ms with the mechanism: confirmed on top of the requirement.

    What a busy machine makes of the second halving is not bounded here, only that it is one.
    """
    deployment = fake_setting(tmp_path, STOCK)
    url = f"sqlite:///{tmp_path / 'memory.sqlite'}"
    half, quarter = replace(STOCK, round_s=0.006), replace(STOCK, round_s=0.003)
    with MemoryStore(url, seed_folder=None) as store:
        remember(store, "half", patch_between(STOCK, half))
        remember(store, "quarter", patch_between(half, quarter))
        chain = [store.get("half").mechanism, store.get("quarter").mechanism]
    code = LoopReplay().replay(chain, str(deployment.folder), url)
    out = capsys.readouterr().out
    assert code == 0, out
    with MemoryStore(url, seed_folder=None) as store:
        found = store.get("quarter")
        (seen,) = found.effects
        assert found.status == "verified" and 1.2 < seen.ratio and 1.0 < seen.low < seen.ratio < seen.high
        told = f"{seen.ratio:.3f}x [{seen.low:.3f}, {seen.high:.3f}] over {len(seen.samples)} pairs"
        assert f"measured again on fake: {told}: confirmed; stored before: none" in out
        assert store.get("half").effects == [] and store.stats().recalled == 0
    (run,) = runs_dir().glob("*-replay-quarter")
    assert list((run / "worktrees").iterdir()) == []


def test_measured_again_and_not_confirmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deployment = fake_setting(tmp_path, STOCK)
    url = f"sqlite:///{tmp_path / 'memory.sqlite'}"
    with MemoryStore(url, seed_folder=None) as store:
        remember(store, "slower", patch_between(STOCK, replace(STOCK, token_s=0.004)))
        chain = [store.get("slower").mechanism]
    assert LoopReplay().replay(chain, str(deployment.folder), url) == 10
    assert "not confirmed (no-gain" in capsys.readouterr().out
    with MemoryStore(url, seed_folder=None) as store:
        assert store.get("slower").status == "refuted"
