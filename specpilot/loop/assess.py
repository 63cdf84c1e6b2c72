"""Assess: measure a candidate against a base, then judge every token it emitted while it was timed.

A failure of the candidate is a verdict on the candidate. A failure of the base, the reference or the machine is an
infrastructure error: never a score; it is retried, and after a few in a row the run stops and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from specpilot.contracts import Calibration, Candidate, Comparison, Leg, Reason, Verdict
from specpilot.errors import InfrastructureError
from specpilot.evaluation.compare import PairEvent, compare
from specpilot.evaluation.errors import CandidateFailed, blame_candidate
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.evaluation.stats import level_for, sample_sd
from specpilot.gate.diffcheck import check_diff
from specpilot.gate.engagement import check_counters_exist
from specpilot.gate.hidden import eos_token_ids, run_hidden_pass, vocab_size
from specpilot.gate.policy import policy_of
from specpilot.gate.records import DiffReport, HiddenPass, SelfTestResult
from specpilot.gate.verdict import judge, rejection
from specpilot.loop.context import RunContext
from specpilot.loop.observe import time_floor
from specpilot.loop.records import Assessment

INFRASTRUCTURE_TRIES = 3
T = TypeVar("T")


def assess(context: RunContext, key: str, candidate: Candidate, base_commit: str) -> Assessment:
    """Measured and judged once; a finished assessment is read from the journal."""

    def run() -> Assessment:
        return patiently(context, key, lambda: _assess(context, key, candidate, base_commit))

    result: Assessment = context.journal.step(key, run, model=Assessment)
    return result


def patiently(context: RunContext, what: str, work: Callable[[], T]) -> T:
    """Runs `work` again after an infrastructure error, a bounded number of times; the last error is raised."""
    for number in range(1, INFRASTRUCTURE_TRIES + 1):
        try:
            return work()
        except InfrastructureError as error:
            context.say("note", level="warning", text=f"{what}: {error.message} (try {number})")
            if number == INFRASTRUCTURE_TRIES:
                raise
    raise AssertionError("unreachable")


def _assess(context: RunContext, key: str, candidate: Candidate, base_commit: str) -> Assessment:
    policy = policy_of(context.deployment.gate)
    diff = check_diff(context.trees.repo, base_commit, candidate.commit, context.spec.editable, policy)
    if not diff.passed:
        return _rejected(candidate, base_commit, diff.reason or Reason.outside_editable, diff.detail)
    try:
        comparison, legs, hidden = _measure(context, key, candidate, base_commit)
    except CandidateFailed as failure:
        return _rejected(candidate, base_commit, failure.reason, failure.detail)
    if hidden is None:
        told = f"ratio {comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}]"
        return _rejected(candidate, base_commit, Reason.no_gain, told, comparison)
    verdict = _judge(context, key, candidate, legs, comparison, hidden, diff)
    context.say("verdict", attempt=candidate.attempt_id, **verdict.model_dump(mode="json"))
    return Assessment(
        attempt_id=candidate.attempt_id,
        base_commit=base_commit,
        commit=candidate.commit,
        comparison=comparison,
        verdict=verdict,
        accepted=verdict.passed,
        reason=verdict.reason,
        detail=verdict.detail,
    )


def _measure(
    context: RunContext, key: str, candidate: Candidate, base_commit: str
) -> tuple[Comparison, list[Leg], HiddenPass | None]:
    """Interleaved pairs; where they show a gain, the candidate also answers the gate's own prompts before it is stopped.

    All are hidden ones. Workers may read the tuning prompts: drafts stored for these are lossless and fast, and nowhere else.
    """
    pool = context.prompts(key)
    with context.engine(base_commit, "final", f"{key}-base") as base:
        with blame_candidate():
            server = context.engine(candidate.commit, "final", f"{key}-candidate")
            started = server.__enter__()
        try:
            comparison, legs = _compare(context, candidate, base, started, pool.stream("hidden"))
            if comparison.decision != "gain":
                return comparison, legs, None
            base.freeze()
            started.thaw()
            context.doing("the gate's own prompts, at several loads", candidate.attempt_id)
            hidden = run_hidden_pass(
                started,
                pool,
                policy_of(context.deployment.gate),
                eos_ids=eos_token_ids(context.resolved.target_dir),
                temperature=context.deployment.regime.temperature,
                block_size=context.identity.block_size,
                vocab=vocab_size(context.resolved.target_dir),
            )
            return comparison, legs, hidden
        finally:
            server.__exit__(None, None, None)


def _compare(
    context: RunContext, candidate: Candidate, base: EngineServer, started: EngineServer, prompts: Iterator[Prompt]
) -> tuple[Comparison, list[Leg]]:
    """Pairs until the interval decides; the error rate is shared over all candidates of the run."""
    decided = [event.data["decision"] for event in context.journal.events(kind="comparison")]
    level = level_for(len(decided) + 1, decided.count("gain"), context.deployment.measurement.alpha)

    def on_pair(event: PairEvent) -> None:
        context.view.event("pair", {"attempt": candidate.attempt_id, **event.model_dump()})

    def on_warm(leg: Leg) -> None:
        check = check_counters_exist(candidate.claim, leg)
        if not check.passed:
            raise CandidateFailed(Reason.not_engaged, f"{check.name}: {check.detail}")

    comparison, legs = compare(
        base,
        started,
        prompts,
        context.deployment.measurement,
        level,
        regime=context.deployment.regime,
        on_pair=on_pair,
        on_warm=on_warm,
        noise_sd=_noise(context),
        max_seconds=context.deployment.measurement.max_seconds,
    )
    context.say("comparison", attempt=candidate.attempt_id, **comparison.model_dump(mode="json"))
    return comparison, legs


def _noise(context: RunContext) -> float | None:
    """Standard deviation of one pair's log-ratio when nothing changed, from the self-test's A/A pairs."""
    if not context.journal.finished("selftest"):
        return None
    pairs = context.journal.result("selftest", SelfTestResult).null_pairs
    return sample_sd([math.log(ratio) for ratio in pairs]) if len(pairs) > 1 else None


def _judge(
    context: RunContext,
    key: str,
    candidate: Candidate,
    legs: list[Leg],
    comparison: Comparison,
    hidden: HiddenPass,
    diff: DiffReport,
) -> Verdict:
    """Forces the recorded tokens through the reference, which is started only now: the candidate is gone by then."""
    calibration: Calibration = context.journal.result("calibrate", Calibration)
    context.doing("its tokens are forced through the reference", candidate.attempt_id)
    with context.engine(context.trees.first_commit, "reference", f"{key}-reference") as reference:
        return judge(
            candidate,
            legs,
            comparison,
            hidden=hidden,
            reference_factory=lambda: reference,
            calibration=calibration,
            bound=time_floor(context),
            policy=policy_of(context.deployment.gate),
            diff=diff,
            target_sha256=context.identity.target_sha256,
            timed_temperature=context.deployment.regime.temperature,
        )


def _rejected(
    candidate: Candidate, base_commit: str, reason: Reason, detail: str, comparison: Comparison | None = None
) -> Assessment:
    verdict = None if comparison is not None else rejection(reason, detail)
    return Assessment(
        attempt_id=candidate.attempt_id,
        base_commit=base_commit,
        commit=candidate.commit,
        comparison=comparison,
        verdict=verdict,
        accepted=False,
        reason=reason,
        detail=detail,
    )
