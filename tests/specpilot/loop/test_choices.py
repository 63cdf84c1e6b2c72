"""The arithmetic of a round: what is measured now and what waits, and what the cost model is told of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpilot.agents import ClaimDraft, FileEdit, Proposal
from specpilot.deployment import Budget
from specpilot.errors import InfrastructureError
from specpilot.journal import Journal
from specpilot.loop.budget import BudgetClock
from specpilot.loop.explore import worth_now
from specpilot.loop.observe import kv_bits
from specpilot.loop.tune import may_try


def proposal(name: str, gain: float | None) -> Proposal:
    return Proposal("recall", "target.mlp", name, ClaimDraft("target.mlp", name, gain), FileEdit(), mechanism=name)


def names(proposals: list[Proposal]) -> list[str]:
    return [item.task for item in proposals]


def test_small_levers_wait_for_the_large_one() -> None:
    """log 2 is 0.693, a quarter of it 0.173: 1.19x stays, 1.18x waits."""
    now, later = worth_now([proposal("big", 2.0), proposal("kept", 1.19), proposal("waits", 1.18)])
    assert (names(now), names(later)) == (["big", "kept"], ["waits"])


def test_small_levers_among_themselves_are_all_measured() -> None:
    now, later = worth_now([proposal("a", 1.08), proposal("b", 1.03), proposal("c", 1.05)])
    assert (names(now), later) == (["a", "b", "c"], [])


def test_without_a_prediction_nobody_waits() -> None:
    now, later = worth_now([proposal("unknown", None), proposal("big", 3.0)])
    assert (names(now), later) == (["unknown", "big"], [])


@pytest.mark.parametrize("gains", [[], [1.0], [0.9, 0.8]])
def test_no_gain_predicted_anywhere(gains: list[float]) -> None:
    """With nothing to gain the threshold is zero: predicted losses wait, an even one does not."""
    now, later = worth_now([proposal(str(gain), gain) for gain in gains])
    assert names(now) == [str(gain) for gain in gains if gain >= 1.0]
    assert len(now) + len(later) == len(gains)


@pytest.mark.parametrize(
    ("info", "config", "bits"),
    [
        ({"kv_cache_dtype": "float32"}, {"torch_dtype": "bfloat16"}, 32.0),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"torch_dtype": "bfloat16"}, 8.0),
        ({"kv_cache_dtype": "auto"}, {"torch_dtype": "bfloat16"}, 16.0),
        ({}, {"dtype": "float32"}, 32.0),
        ({}, {}, 16.0),
    ],
)
def test_bits_of_the_cache_are_the_engines(tmp_path: Path, info: dict, config: dict, bits: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bits(info, tmp_path) == bits


def test_an_unknown_cache_type_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InfrastructureError, match="'int3'"):
        kv_bits({"kv_cache_dtype": "int3"}, tmp_path)


@pytest.mark.parametrize(
    ("used_s", "waiting", "owed_s", "allowed"),
    [
        (270, 1, 0, True),
        (280, 1, 0, False),
        (270, 2, 0, False),
        (345, 0, 0, True),
        (270, 1, 75, False),
        (195, 1, 75, True),
    ],
)
def test_knobs_are_screened_only_while_candidates_keep_their_time(
    tmp_path: Path, used_s: float, waiting: int, owed_s: float, allowed: bool
) -> None:
    """Ten minutes less 150 s for the closing session: 450 s. A trial takes 25 s, each candidate 75 s, the search's own included,
    and each change that was merged before is to be re-tested."""
    journal = Journal.create(tmp_path / "journal.db", {"elapsed_s": used_s})
    assert may_try(BudgetClock(Budget(wall_clock_minutes=10.0), journal), waiting, owed_s) is allowed
