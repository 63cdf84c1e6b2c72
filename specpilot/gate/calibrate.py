"""What counts as a near-tie here: the reference against itself in another batch shape.

The reference (autoregressive, float32 compute, from the run's first commit) generates greedily, one row per step and then
several requests at once, and is then asked to score its own answers in one many-row pass. Where the two disagree,
nothing but summation order is to blame: those gaps, and how far log-probability margins move when the same position is
scored in a pass of another length, set epsilon; how often they occur sets the allowed rate of near-ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specpilot.contracts import Calibration, Generation
from specpilot.evaluation.legs import run_leg
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.gate.bounds import binomial_upper, quantile
from specpilot.gate.errors import GateUnsoundError
from specpilot.gate.forcing import force, score_generation
from specpilot.gate.policy import policy_of
from specpilot.gate.records import ForcingTally, GatePolicy

MOST_EPSILON = 0.5
"""Nats. A reference whose own noise asks for a wider near-tie than that is broken, not noisy."""

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def calibrate(
    reference: EngineServer,
    prompts: Sequence[Prompt],
    settings: Any = None,
    *,
    max_new_tokens: int | None = None,
    baseline: Sequence[Generation] | None = None,
) -> Calibration:
    """Calibrate on a started reference server.

    `prompts`: half of them (rounded up) are generated one at a time, the rest four at a time. `baseline`: greedy answers of
    the `ar` variant, scored for information only. Raises GateUnsoundError if the reference disagrees with itself
    beyond any rounding.
    """
    policy = policy_of(settings)
    tokens = max_new_tokens or policy.hidden_tokens
    half = (len(prompts) + 1) // 2
    generations: list[Generation] = []
    for some, concurrency in ((prompts[:half], 1), (prompts[half:], 4)):
        if some:
            leg = run_leg(reference, some, concurrency=concurrency, max_new_tokens=tokens, side="reference")
            generations += leg.generations
    gaps, margins, near_ties = measure_noise(reference.client, generations)
    calibration = from_gaps(gaps, near_ties, margins, policy)
    if baseline:
        tally = force(reference.client, baseline, calibration.epsilon)
        calibration = calibration.model_copy(update={"baseline_note": describe(tally, "ar")})
    return calibration


def measure_noise(client: Any, generations: Sequence[Generation]) -> tuple[list[float], list[float], int]:
    """Gaps at every position, shifts of the margin between the best two tokens, and the number of non-argmax positions.

    The margin is compared between the pass over the whole answer and a pass over its first half.
    """

    def both(generation: Generation) -> tuple[Sequence[Any], Sequence[Any]]:
        half = generation.model_copy(update={"output_ids": generation.output_ids[: len(generation.output_ids) // 2]})
        return score_generation(client, generation), score_generation(client, half)

    gaps: list[float] = []
    margins: list[float] = []
    near_ties = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for whole, half in pool.map(both, generations):
            gaps += [p.gap for p in whole]
            near_ties += sum(p.token != p.top_token for p in whole)
            margins += [abs(_margin(a) - _margin(b)) for a, b in zip(whole, half, strict=False)]
    return gaps, margins, near_ties


def _margin(position: Any) -> float:
    (_, best), (_, second) = position.top[0], position.top[1]
    return float(best - second)


def from_gaps(gaps: Sequence[float], near_ties: int, margins: Sequence[float], policy: GatePolicy) -> Calibration:
    """Epsilon and rate limit from measured gaps and margin shifts (nats). Pure.

    epsilon = max(floor, safety x 99.9 % quantile of gaps, safety x 99.9 % quantile of margin shifts, largest gap);
    rate limit = Clopper-Pearson upper bound of the observed share of near-ties, at least the floor. The bound counts at zero
    near-ties as well: that none was seen in n positions rules out no share below 1 - (1 - confidence)^(1/n). Raises
    GateUnsoundError for no position, and where epsilon would be above `MOST_EPSILON` even without the floor.
    """
    if not gaps:
        raise GateUnsoundError("calibration saw no position", "give it at least one prompt and one new token")
    largest = max(gaps)
    noise = max(
        policy.epsilon_safety * quantile(gaps, 0.999), policy.epsilon_safety * quantile(margins, 0.999), largest
    )
    if not noise <= MOST_EPSILON:
        raise GateUnsoundError(
            f"the reference disagrees with itself by {largest:.3f} nats (epsilon would be {noise:.3f}, "
            f"at most {MOST_EPSILON:g} is noise)",
            "its decode and scoring paths compute different things; mend the engine before any candidate is judged",
        )
    quantiles = {name: quantile(gaps, share) for name, share in SHARES.items()}
    quantiles |= {f"margin_shift_{name}": quantile(margins, share) for name, share in SHARES.items()}
    quantiles["margin_shift_max"] = max(margins, default=0.0)
    upper = binomial_upper(near_ties, len(gaps), policy.near_tie_confidence)
    return Calibration(
        epsilon=max(policy.epsilon_floor, noise),
        near_tie_rate_limit=max(policy.near_tie_rate_floor, upper),
        positions=len(gaps),
        near_ties=near_ties,
        max_gap=largest,
        gap_quantiles=quantiles,
        method=(
            "reference (autoregressive, float32 compute) generated greedily at concurrency 1 and 4, then scored its answers in one "
            f"many-row pass; epsilon = max(floor {policy.epsilon_floor:g}, {policy.epsilon_safety:g} x 99.9 % quantile of gaps and "
            f"of margin shifts, largest gap); near-tie share limit = max(floor {policy.near_tie_rate_floor:g}, "
            f"{policy.near_tie_confidence:.1%} Clopper-Pearson bound of {near_ties}/{len(gaps)})"
        ),
    )


def describe(tally: ForcingTally, name: str) -> str:
    """One sentence on how another engine scores, for the report."""
    share = tally.near_ties / tally.positions if tally.positions else 0.0
    return (
        f"{name}: {tally.exact} of {tally.positions} positions exact, {tally.near_ties} near-ties ({share:.2%}), "
        f"{tally.violations} beyond epsilon, largest gap {tally.max_gap:.4f} nats"
    )
