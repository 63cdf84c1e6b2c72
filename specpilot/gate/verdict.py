"""The verdict: every check on one candidate, cheap ones first, ending in token forcing.

Judges recorded evidence (timed legs, comparison, hidden pass) and asks the reference to score tokens. It starts no
candidate. The first failed stage gives the reason; later, dearer stages are then not run and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specpilot.contracts import Calibration, Candidate, Check, Comparison, Generation, Leg, Reason, Verdict
from specpilot.gate import accounting, engagement, lengths, timing
from specpilot.gate.bounds import binomial_tail
from specpilot.gate.distribution import check_distribution
from specpilot.gate.forcing import Scorer, force, score_generation
from specpilot.gate.records import DiffReport, ForcingTally, GatePolicy, HiddenPass, TimeFloor
from specpilot.gate.replay import check_replay

Judged = tuple[Check, Reason]

SERVED_AT_ONCE = 4
"""Requests that any engine serves together in the hidden pass, where no base answers beside it."""


@dataclass(frozen=True)
class Evidence:
    """All that is known about a candidate when the gate sits."""

    candidate: Candidate
    base_legs: list[Leg]
    legs: list[Leg]
    comparison: Comparison | None
    hidden: HiddenPass
    policy: GatePolicy
    floor: TimeFloor | None
    target_sha256: str | None

    @property
    def timed(self) -> list[Generation]:
        """Timed answers of the candidate, in order."""
        return [g for leg in self.legs for g in leg.generations]

    @property
    def fixed(self) -> list[Generation]:
        """Timed and hidden fixed-length answers of the candidate."""
        return [*self.timed, *(g for leg in self.hidden.legs for g in leg.generations)]

    @property
    def answers(self) -> list[Generation]:
        """Every answer of the candidate that is on record, sampled ones too."""
        hidden = self.hidden
        extra = [leg for leg in (hidden.natural, hidden.sampled) if leg is not None]
        replayed = [*hidden.replay.fresh, *hidden.replay.repeated] if hidden.replay else []
        return [*self.fixed, *(g for leg in extra for g in leg.generations), *replayed]


def judge(
    candidate: Candidate,
    timed: Sequence[Leg],
    comparison: Comparison | None,
    *,
    hidden: HiddenPass,
    reference_factory: Callable[[], Any],
    calibration: Calibration,
    bound: TimeFloor | None = None,
    policy: GatePolicy | None = None,
    diff: DiffReport | None = None,
    target_sha256: str | None = None,
    timed_temperature: float = 0.0,
) -> Verdict:
    """Judge one candidate.

    `timed`: legs of both sides as `compare` returns them. `reference_factory` gives the started reference (an `EngineServer` or its client)
    and is called only if the cheap checks pass; starting and stopping it is the caller's. `bound`: fastest possible round.
    `target_sha256`: digest the served checkpoint must state. `timed_temperature`: of the timed legs; above 0 their tokens are
    tested against the reference's distribution instead of its argmax.
    """
    evidence = Evidence(
        candidate=candidate,
        base_legs=[leg for leg in timed if leg.side == "base"],
        legs=[leg for leg in timed if leg.side == "candidate"],
        comparison=comparison,
        hidden=hidden,
        policy=policy or GatePolicy(),
        floor=bound,
        target_sha256=target_sha256,
    )
    checks = list(diff.checks) if diff is not None else []
    if diff is not None and not diff.passed:
        return _rejected(checks, diff.reason or Reason.outside_editable, diff.detail)
    for stage in (identity_checks, completeness_checks, accounting_checks, engagement_checks, timing_checks):
        judged = stage(evidence)
        checks += [check for check, _ in judged]
        failed = next(((check, reason) for check, reason in judged if not check.passed), None)
        if failed is not None:
            checks.append(Check(name="forcing", passed=False, detail="not run: a cheaper check failed"))
            return _rejected(checks, failed[1], f"{failed[0].name}: {failed[0].detail}")
    return _force_all(evidence, checks, reference_factory, calibration, timed_temperature)


def rejection(reason: Reason, detail: str) -> Verdict:
    """Verdict on a candidate that failed before there was evidence to judge (did not start, crashed, hung)."""
    return _rejected([Check(name="ran", passed=False, detail=detail)], reason, detail)


def identity_checks(e: Evidence) -> list[Judged]:
    """The legs were served by the candidate's commit, from the deployment's checkpoint."""
    commits = {leg.commit for leg in [*e.legs, *e.hidden.legs]}
    check = Check(name="identity.commit", passed=commits <= {e.candidate.commit}, detail=f"served {sorted(commits)}")
    judged: list[Judged] = [(check, Reason.wrong_identity)]
    if e.target_sha256 is not None:
        target = e.hidden.server_info.get("target")  # whatever the candidate wrote there
        stated = target.get("sha256") if isinstance(target, dict) else None
        detail = f"engine states {stated}, deployment has {e.target_sha256}"
        judged.append(
            (Check(name="identity.weights", passed=stated == e.target_sha256, detail=detail), Reason.wrong_weights)
        )
    return judged


def completeness_checks(e: Evidence) -> list[Judged]:
    """Every request answered, with the asked number of tokens and the stop rules kept."""
    judged: list[Judged] = []
    for base, leg in zip(e.base_legs, e.legs, strict=False):
        judged.append(
            (lengths.check_answered([g.prompt_id for g in base.generations], leg.generations), Reason.missing_responses)
        )
        judged.append((lengths.check_same_lengths(base, leg), Reason.length_mismatch))
    counts = len(e.legs) == len(e.base_legs)
    told = f"{len(e.legs)} candidate legs, {len(e.base_legs)} base legs"
    judged.append((Check(name="lengths.legs", passed=counts, detail=told), Reason.missing_responses))
    for leg in e.hidden.legs:
        judged.append((lengths.check_fixed_length(leg.generations, e.hidden.requested_tokens), Reason.length_mismatch))
    if e.hidden.natural is not None:
        check = lengths.check_natural_stops(
            e.hidden.natural.generations, e.hidden.natural_limit, e.hidden.eos_token_ids
        )
        judged.append((check, Reason.stop_mismatch))
    judged.append((lengths.check_known_tokens(e.answers, e.hidden.vocab_size), Reason.token_mismatch))
    return judged


def accounting_checks(e: Evidence) -> list[Judged]:
    """Counted tokens against claimed tokens, rounds and counters."""
    block = e.hidden.block_size
    checks = [
        accounting.check_claimed_tokens(e.answers),
        accounting.check_rounds(e.answers, block),
        accounting.check_first_chunk(e.fixed, block),
        *(accounting.check_committed(leg, block) for leg in [*e.legs, *e.hidden.legs]),
    ]
    return [(check, Reason.accounting_mismatch) for check in checks]


def engagement_checks(e: Evidence) -> list[Judged]:
    """The claimed code ran in the timed legs, nothing fell back, speculation is on."""
    claim = e.candidate.claim
    legs = e.legs or e.hidden.legs
    return [
        (engagement.check_no_fallback(claim, [*e.legs, *e.hidden.legs]), Reason.fell_back),
        (engagement.check_engaged(claim, legs, e.policy.engagement_share), Reason.not_engaged),
        (
            engagement.check_speculation(claim, e.base_legs, legs, e.policy.speculation_off_length),
            Reason.speculation_off,
        ),
    ]


def timing_checks(e: Evidence) -> list[Judged]:
    """Possible times, no repeated prompt answered from store, no request held back."""
    judged: list[Judged] = [
        (timing.check_possible(e.fixed, e.hidden.block_size, e.floor, e.policy.time_slack), Reason.impossible_time)
    ]
    if e.hidden.replay is not None:
        judged.append((check_replay(e.hidden.replay, e.policy), Reason.replayed_answers))
    # The base's own, where its requests run together enough for a queue to show: the faster answers are, the less they overlap.
    beside = [(leg, timing.in_flight(base)) for base, leg in zip(e.base_legs, e.legs, strict=False)]
    for leg, expected in [*beside, *((leg, SERVED_AT_ONCE) for leg in e.hidden.legs)]:
        if leg.concurrency > 1:
            judged.append((timing.check_admission(leg, expected, e.policy.overlap_share), Reason.accounting_mismatch))
    return judged


def trade_checks(e: Evidence) -> list[Judged]:
    """Gains that were moved into prefill or start-up. After forcing, because wrong tokens are the graver fault."""
    judged: list[Judged] = []
    if e.legs and e.base_legs:
        judged.append((timing.check_first_token(e.base_legs, e.legs), Reason.accounting_mismatch))
    if e.comparison is not None:
        judged.append((timing.check_end_to_end(e.comparison), Reason.no_gain))
        base_s, own_s = e.comparison.base.startup_s, max(e.comparison.candidate.startup_s, e.hidden.startup_s)
        judged.append((timing.check_startup(base_s, own_s, e.policy), Reason.start_failed))
    return judged


def _force_all(
    e: Evidence, checks: list[Check], reference_factory: Callable[[], Any], calibration: Calibration, temperature: float
) -> Verdict:
    """Last stage: tokens against the reference, the timed ones first."""
    reference = scorer_of(reference_factory())
    greedy = [g for leg in e.hidden.legs for g in leg.generations]
    greedy += e.hidden.natural.generations if e.hidden.natural else []
    greedy += [*e.hidden.replay.fresh, *e.hidden.replay.repeated[-1:]] if e.hidden.replay else []
    groups = {"forcing.timed": e.timed if temperature <= 0.0 else [], "forcing.hidden": greedy}
    total = ForcingTally(sequences=[], positions=0, exact=0, near_ties=0, violations=0, max_gap=0.0)
    for name, generations in groups.items():
        tally = force(reference, generations, calibration.epsilon, stop_after=e.policy.stop_after_violations)
        total = _sum(total, tally)
        check, reason = forcing_check(name, tally, calibration, e.policy)
        checks.append(check)
        if not check.passed:
            return _rejected(checks, reason, f"{name}: {check.detail}", total)
    # A timed leg shares one seed among its requests: only one answer of each is independent of the others.
    timed = [leg.generations[0] for leg in e.legs] if temperature > 0.0 else []
    sampled = [*timed, *(e.hidden.sampled.generations if e.hidden.sampled else [])]
    if sampled:
        at = temperature if temperature > 0.0 else e.hidden.temperature
        top = e.policy.distribution_top
        positions = [p for g in sampled for p in score_generation(reference, g, top)]
        check = check_distribution(positions, at, e.policy.distribution_alpha)
        checks.append(check)
        if not check.passed:
            return _rejected(checks, Reason.distribution_mismatch, f"{check.name}: {check.detail}", total)
    for check, reason in trade_checks(e):
        checks.append(check)
        if not check.passed:
            return _rejected(checks, reason, f"{check.name}: {check.detail}", total)
    return _verdict(checks, None, "all checks passed", total)


def forcing_check(name: str, tally: ForcingTally, calibration: Calibration, policy: GatePolicy) -> tuple[Check, Reason]:
    """Line of evidence from a tally: no violation, and no more near-ties than the reference's own rate explains.

    The rate is refused when that many near-ties or more have a probability below 1 - `near_tie_confidence` at the limit.
    """
    share = tally.near_ties / tally.positions if tally.positions else 0.0
    told = (
        f"{tally.positions} positions: {tally.exact} exact, {tally.near_ties} near-ties ({share:.2%}, limit "
        f"{calibration.near_tie_rate_limit:.2%}), {tally.violations} violations, largest gap {tally.max_gap:.4f} nats, "
        f"epsilon {calibration.epsilon:.4f}" + (f", {tally.skipped} answers not scored" if tally.skipped else "")
    )
    if tally.violations:
        worst = next(s for s in tally.sequences if s.violations)
        told += f"; first in {worst.prompt_id} at output position {worst.first_violation}: {worst.first_violation_note}"
        return Check(name=name, passed=False, detail=told), Reason.token_mismatch
    tail = binomial_tail(tally.near_ties, tally.positions, calibration.near_tie_rate_limit)
    return Check(name=name, passed=tail >= 1.0 - policy.near_tie_confidence, detail=told), Reason.near_tie_rate


def scorer_of(server: Any) -> Scorer:
    """The scoring client of a started server, or the client itself."""
    client: Scorer = getattr(server, "client", server)
    return client


def _sum(left: ForcingTally, right: ForcingTally) -> ForcingTally:
    return ForcingTally(
        sequences=[*left.sequences, *right.sequences],
        positions=left.positions + right.positions,
        exact=left.exact + right.exact,
        near_ties=left.near_ties + right.near_ties,
        violations=left.violations + right.violations,
        max_gap=max(left.max_gap, right.max_gap),
        skipped=left.skipped + right.skipped,
    )


def _rejected(checks: list[Check], reason: Reason, detail: str, tally: ForcingTally | None = None) -> Verdict:
    return _verdict(checks, reason, detail, tally)


def _verdict(checks: list[Check], reason: Reason | None, detail: str, tally: ForcingTally | None) -> Verdict:
    return Verdict(
        passed=reason is None,
        reason=reason,
        detail=detail,
        checks=checks,
        positions=tally.positions if tally else 0,
        exact=tally.exact if tally else 0,
        near_ties=tally.near_ties if tally else 0,
        violations=tally.violations if tally else 0,
        max_gap=tally.max_gap if tally else 0.0,
    )
