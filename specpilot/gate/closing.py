"""The closing session judged: figures of an engine that emitted other tokens there than the target would are no figures.

A merged engine was judged as a candidate, as the variant `final` and after timed tuning prompts. It can tell the closing session
from that (by its variant, by the texts), so what it answered there is judged once more, from what was recorded while it was
timed. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specpilot.contracts import Calibration, Check, Generation, Leg
from specpilot.gate import accounting, lengths, timing
from specpilot.gate.bounds import binomial_upper
from specpilot.gate.calibrate import MOST_EPSILON
from specpilot.gate.distribution import check_distribution
from specpilot.gate.forcing import Scorer, force, score_generation
from specpilot.gate.records import GatePolicy, TimeFloor
from specpilot.gate.verdict import forcing_check

JUDGED = {"final": "stock", "final-ar": "ar"}
"""Figures of code from a search, and the untouched engine beside which the time to their first token is held."""


def closing_checks(
    legs: Mapping[str, Sequence[Leg]],
    reference: Scorer,
    calibration: Calibration,
    policy: GatePolicy,
    *,
    block_size: int,
    floor: TimeFloor | None = None,
    vocab: int | None = None,
    temperature: float = 0.0,
) -> dict[str, list[Check]]:
    """The checks of the answers of each engine in `JUDGED`, by name. The tokens are forced only where all else is right.

    `legs`: every named engine's legs of the session. `block_size`: most tokens of a decode round. `vocab`: tokens that the target
    knows. Raises EvidenceError when the reference scores other tokens than it was asked about.
    """
    judged: dict[str, list[Check]] = {}
    for name in JUDGED.keys() & legs.keys():
        answers = [g for leg in legs[name] for g in leg.generations]
        checks = [
            lengths.check_known_tokens(answers, vocab),
            accounting.check_claimed_tokens(answers),
            accounting.check_first_chunk(answers, block_size),
            timing.check_possible(answers, block_size, floor, policy.time_slack),
            timing.check_first_token(legs.get(JUDGED[name], []), legs[name]),
        ]
        if all(check.passed for check in checks):
            checks.append(_tokens(answers, reference, calibration, policy, temperature))
            if not checks[-1].passed and name == "final-ar" and temperature == 0.0:
                beside = [g for leg in legs.get("ar", []) for g in leg.generations]
                checks[-1] = _tokens(
                    answers, reference, widened(calibration, beside, reference, policy), policy, temperature
                )
        judged[name] = checks
    return judged


def faults_of(judged: Mapping[str, Sequence[Check]]) -> dict[str, str]:
    """What is wrong with the answers of each engine, by name; empty if nothing."""
    failed = {name: next((check for check in checks if not check.passed), None) for name, checks in judged.items()}
    return {name: f"{check.name}: {check.detail}" for name, check in failed.items() if check is not None}


def widened(
    calibration: Calibration, untouched: Sequence[Generation], reference: Scorer, policy: GatePolicy
) -> Calibration:
    """The limits for `final-ar`: at least what the untouched `ar` shows on the same prompts, for that is what it computes.

    `ar` works in the checkpoint's own precision and so lies beyond the float32 reference's epsilon at a few positions in
    a thousand. Epsilon becomes `epsilon_safety` times its largest gap, at most `MOST_EPSILON` nats; the allowed share
    of near-ties the upper bound of its own where it shows any (none seen is no reason to allow more). Never narrower
    than `calibration`.
    """
    tally = force(reference, untouched, calibration.epsilon)
    unlike = tally.near_ties + tally.violations
    return calibration.model_copy(
        update={
            "epsilon": max(calibration.epsilon, min(MOST_EPSILON, policy.epsilon_safety * tally.max_gap)),
            "near_tie_rate_limit": max(
                calibration.near_tie_rate_limit,
                binomial_upper(unlike, tally.positions, policy.near_tie_confidence) if unlike else 0.0,
            ),
        }
    )


def _tokens(
    answers: Sequence[Generation], reference: Scorer, calibration: Calibration, policy: GatePolicy, temperature: float
) -> Check:
    if temperature > 0.0:
        positions = [p for g in answers for p in score_generation(reference, g, policy.distribution_top)]
        return check_distribution(positions, temperature, policy.distribution_alpha)
    tally = force(reference, answers, calibration.epsilon, stop_after=policy.stop_after_violations)
    return forcing_check("forcing.closing", tally, calibration, policy)[0]
