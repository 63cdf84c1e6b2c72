"""Who is blamed when a trial of the search is screened, and what the gate's own test asks its engines for: real servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from specpilot.contracts import Reason
from specpilot.evaluation.client import EngineClient
from specpilot.evaluation.errors import CandidateFailed, EngineCrash
from specpilot.evaluation.legs import decode_rate, run_leg
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.gate import selftest
from specpilot.gate.cheats.corpus import Stage
from specpilot.gate.records import GatePolicy
from specpilot.gate.trial import Bench, gather
from specpilot.loop.tune import screened

PROMPTS = [Prompt(id=f"p{number}", source="s", text="", ids=[5, 6, number]) for number in range(20, 24)]
BATCHES = [PROMPTS[:1], PROMPTS[1:2], PROMPTS[2:3]]


def rate(server: EngineServer, batch: Sequence[Prompt]) -> float:
    return decode_rate(run_leg(server, batch, concurrency=1, max_new_tokens=9, side="any"))


def screen(base: EngineServer, trial: AbstractContextManager[EngineServer]) -> float:
    return screened(trial, base, BATCHES, rate)


def test_a_trial_is_compared_with_its_base(engine, make_engine) -> None:
    assert screen(engine(), make_engine(commit="bb")) > 0.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"error_after_requests": 1}, Reason.crashed),
        ({"die_after_requests": 0}, Reason.crashed),
        ({"fail_start": "no"}, Reason.start_failed),
    ],
)
def test_a_trial_that_fails_is_the_trials_failure(engine, make_engine, fault: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(CandidateFailed) as caught:
        screen(engine(), make_engine(commit="bb", **fault))
    assert caught.value.reason is reason


@pytest.mark.parametrize("fault", ["error_after_requests", "die_after_requests"])
def test_a_base_that_fails_is_not_the_trials_failure(engine, make_engine, fault: str) -> None:
    base = engine(**{fault: 0})
    with pytest.raises(EngineCrash):
        screen(base, make_engine(commit="bb"))
    assert (base.child.poll() is None) is (fault == "error_after_requests")


def test_sampled_answers_of_the_self_test_are_independent(
    engine, deployment, resolved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed for four requests would give all of them the same random numbers."""
    asked: list[tuple[float, int | None]] = []
    send = EngineClient.generate

    def note(self: EngineClient, ids: Sequence[int], **options: Any) -> Any:
        asked.append((options.get("temperature", 0.0), options.get("seed")))
        return send(self, ids, **options)

    monkeypatch.setattr(EngineClient, "generate", note)
    (resolved.target_dir / "config.json").write_text("{}")
    bench: Any = SimpleNamespace(
        policy=GatePolicy(hidden_tokens=8), prompts=PROMPTS, base_legs=[], models=resolved, temperature=0.7
    )
    _, hidden = gather(engine(), bench, frozenset({Stage.sampled}))
    assert hidden.sampled is not None and len(hidden.sampled.generations) == 4
    assert asked == [(0.7, None)] * 4
    assert set(vars(bench)) < set(Bench.__dataclass_fields__)


def test_the_self_test_uses_the_cores_that_it_may_use(deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert selftest._threads(deployment) == 3
