"""Order and outcome of the verdict's stages, and the calibration arithmetic, on hand-made evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specpilot.contracts import Calibration, Check, Reason, Verdict
from specpilot.deployment import GateSettings
from specpilot.errors import GateUnsoundError
from specpilot.gate.bounds import binomial_upper
from specpilot.gate.calibrate import from_gaps
from specpilot.gate.policy import policy_of
from specpilot.gate.records import DiffReport, GatePolicy, ReplayProbe, TimeFloor
from specpilot.gate.verdict import judge, rejection

from .builders import candidate, claim, generation, hidden, leg, position

CALIBRATION = Calibration(
    epsilon=0.125,
    near_tie_rate_limit=0.01,
    positions=1000,
    near_ties=0,
    max_gap=0.0,
    gap_quantiles={},
    method="by hand",
)


class Reference:
    """Agrees with everything but the tokens in `gaps`."""

    def __init__(self, gaps: dict[int, float] | None = None) -> None:
        self.gaps = gaps or {}
        self.calls = 0

    def score(self, ids: list[int], start: int, top: int = 2) -> Sequence[Any]:
        self.calls += 1
        return [
            position(t, 9999, self.gaps[t], i) if t in self.gaps else position(t, t, 0.0, i)
            for i, t in enumerate(ids[start:], start)
        ]


def timed() -> list[Any]:
    answers = [generation([21, 22, 23, 24], f"p{i}") for i in range(3)]
    return [leg(answers, "base"), leg(answers)]


def verdict(reference: Reference | None = None, **changes: Any) -> Verdict:
    values: dict[str, Any] = {
        "hidden": hidden(),
        "reference_factory": lambda: reference or Reference(),
        "calibration": CALIBRATION,
    }
    legs = changes.pop("timed", timed())
    who = changes.pop("candidate", candidate())
    return judge(who, legs, changes.pop("comparison", None), **(values | changes))


def failed(result: Verdict) -> list[str]:
    return [c.name for c in result.checks if not c.passed]


def test_a_clean_candidate_passes_with_all_its_positions() -> None:
    result = verdict()
    assert result.passed, result.detail
    assert result.reason is None
    assert (result.positions, result.exact, result.violations) == (16, 16, 0)
    assert failed(result) == []


def test_tokens_that_the_target_does_not_know_never_reach_the_reference() -> None:
    """It would refuse them, and a failure of the reference is infrastructure: three of those end a run."""
    reference = Reference()
    assert verdict(reference, hidden=hidden(vocab_size=25)).passed
    asked = reference.calls
    result = verdict(reference, hidden=hidden(vocab_size=24))
    assert result.reason is Reason.token_mismatch and "token 24, the target knows 24" in result.detail
    assert failed(result)[0] == "lengths.known" and reference.calls == asked


def test_a_violation_in_the_timed_tokens() -> None:
    result = verdict(Reference({23: 0.126}))
    assert result.reason is Reason.token_mismatch
    assert "forcing.timed" in result.detail
    assert "output position 2" in result.detail


def test_a_near_tie_at_epsilon_is_one_of_many_positions_and_passes() -> None:
    many = [generation([*range(100, 199), 23], f"p{i}") for i in range(1)]
    result = verdict(Reference({23: 0.125}), timed=[leg(many, "base"), leg(many)])
    assert result.passed
    assert result.near_ties == 1
    assert result.max_gap == 0.125


def test_a_violation_in_hidden_answers_only() -> None:
    result = verdict(Reference({13: 1.0}))
    assert result.reason is Reason.token_mismatch
    assert failed(result) == ["forcing.hidden"]


def test_cheap_checks_come_first_and_the_reference_is_not_asked() -> None:
    reference = Reference({23: 5.0})
    short = [leg([generation([21, 22], f"p{i}") for i in range(3)])]
    result = verdict(reference, timed=[timed()[0], *short])
    assert result.reason is Reason.length_mismatch
    assert reference.calls == 0
    assert failed(result)[-1] == "forcing"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"timed": timed()[:1]}, Reason.missing_responses),
        ({"candidate": candidate(commit="c2")}, Reason.wrong_identity),
        ({"target_sha256": "abc"}, Reason.wrong_weights),
        ({"target_sha256": "abc", "hidden": hidden(server_info={"target": "abc"})}, Reason.wrong_weights),
        ({"target_sha256": "abc", "hidden": hidden(server_info={"target": ["sha256"]})}, Reason.wrong_weights),
        ({"candidate": candidate(claim=claim(counters=["no_such"]))}, Reason.not_engaged),
        ({"candidate": candidate(claim=claim(forbidden_counters=["target_forwards"]))}, Reason.fell_back),
        ({"bound": TimeFloor(round_s=1.0)}, Reason.impossible_time),
        ({"hidden": hidden(requested_tokens=5)}, Reason.length_mismatch),
        ({"hidden": hidden(natural=leg([generation([5, 6], finish_reason="stop")]))}, Reason.stop_mismatch),
        ({"hidden": hidden(legs=[leg([generation([11, 12, 13, 14], claimed_tokens=9)])])}, Reason.accounting_mismatch),
        (
            {
                "hidden": hidden(
                    replay=ReplayProbe(
                        fresh=[generation([31, 32], last_s=9.0)], repeated=[generation([31, 32], last_s=1.0)]
                    )
                )
            },
            Reason.replayed_answers,
        ),
    ],
)
def test_each_stage_gives_its_reason(changes: dict[str, Any], reason: Reason) -> None:
    result = verdict(**changes)
    assert result.reason is reason, result.detail
    assert not result.passed


def test_decode_work_before_the_first_token() -> None:
    base = [generation([21, 22, 23, 24], f"p{i}", submitted_s=0.0, first_s=1.0, last_s=5.0) for i in range(3)]
    moved = [g.model_copy(update={"first_s": 4.9}) for g in base]
    result = verdict(timed=[leg(base, "base"), leg(moved)])
    assert result.reason is Reason.accounting_mismatch
    assert failed(result) == ["timing.first-token"]
    faster = [g.model_copy(update={"last_s": 3.0}) for g in base]
    assert verdict(timed=[leg(base, "base"), leg(faster)]).passed


def test_a_refused_diff_is_judged_alone() -> None:
    report = DiffReport(
        passed=False,
        reason=Reason.outside_editable,
        detail="1 not editable: engine.toml",
        checks=[Check(name="diff.editable", passed=False, detail="engine.toml")],
        changed=["engine.toml"],
    )
    reference = Reference()
    result = verdict(reference, diff=report)
    assert (result.reason, reference.calls) == (Reason.outside_editable, 0)


def test_rejection_without_evidence() -> None:
    result = rejection(Reason.crashed, "exit status -11")
    assert (result.passed, result.reason, result.positions) == (False, Reason.crashed, 0)
    assert Verdict.model_validate_json(result.model_dump_json()) == result


# -- calibration


def test_epsilon_is_the_largest_of_its_four_sources() -> None:
    quiet = [0.0] * 999
    policy = GatePolicy(epsilon_floor=0.01, epsilon_safety=2.0)
    assert from_gaps([*quiet, 0.0], 0, [], policy).epsilon == 0.01
    assert from_gaps([*quiet, 0.03], 1, [], policy).epsilon == 0.03  # the largest gap; the 99.9 % quantile is 0
    assert from_gaps([*quiet[:-1], 0.03, 0.03], 2, [], policy).epsilon == 0.06  # twice the quantile
    assert from_gaps([*quiet, 0.0], 0, [0.04] * 10, policy).epsilon == 0.08  # margins


def test_rate_limit_is_a_bound_and_never_below_its_floor() -> None:
    policy = GatePolicy(near_tie_rate_floor=0.005, near_tie_confidence=0.999)
    none = from_gaps([0.0] * 1000, 0, [], policy)
    assert none.near_tie_rate_limit == pytest.approx(1 - 0.001 ** (1 / 1000))  # (1 - p)^1000 = 0.1 %
    assert "max(floor 0.005, 99.9% Clopper-Pearson bound of 0/1000)" in none.method
    assert from_gaps([0.0] * 2000, 0, [], policy).near_tie_rate_limit == 0.005
    limit = from_gaps([0.0] * 990 + [0.001] * 10, 10, [], policy).near_tie_rate_limit
    assert limit == pytest.approx(binomial_upper(10, 1000, 0.999))
    assert limit > 0.01


def test_a_reference_that_disagrees_with_itself_stops_everything() -> None:
    with pytest.raises(GateUnsoundError, match="disagrees with itself by 0.600"):
        from_gaps([0.0, 0.6], 1, [], GatePolicy())
    with pytest.raises(GateUnsoundError, match="disagrees"):
        from_gaps([0.0, float("inf")], 1, [], GatePolicy())
    with pytest.raises(GateUnsoundError, match=r"by 0.300 .*epsilon would be 0.600"):  # twice the quantile
        from_gaps([0.0] * 8 + [0.3] * 2, 2, [], GatePolicy())
    assert from_gaps([0.0, 0.25], 1, [], GatePolicy()).epsilon == 0.5
    # A floor that a deployment sets is no noise of the reference.
    assert from_gaps([0.0, 0.001], 1, [], GatePolicy(epsilon_floor=0.75)).epsilon == 0.75
    with pytest.raises(GateUnsoundError, match="no position"):
        from_gaps([], 0, [], GatePolicy())


def test_policy_takes_what_a_deployment_sets() -> None:
    class Settings:
        epsilon_floor = 0.05
        hidden_prompts = 2
        unknown = 7
        near_tie_rate_floor = None

    policy = policy_of(Settings())
    assert (policy.epsilon_floor, policy.hidden_prompts) == (0.05, 2)
    assert policy.near_tie_rate_floor == GatePolicy().near_tie_rate_floor
    assert policy_of({"natural_stop_prompts": 0}).natural_stop_prompts == 0
    assert policy_of(None) == policy_of({}) == policy_of(GateSettings()) == GatePolicy()
    assert policy_of(policy) is policy
