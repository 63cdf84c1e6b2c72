"""Engagement proof: the changed code ran, with counts, in the very legs that were timed.

Pure functions on legs and a claim. A candidate names the counters that its change drives and those
that must not move (a fallback). Counters are the engine's own, so this catches code that never ran or that fell back, not a
counter that lies; what a lying counter would hide gains nothing, because the timing and the tokens are judged apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpilot.contracts import Check, Claim, Leg
from specpilot.evaluation.legs import accepted_length


def leg_rounds(leg: Leg) -> float:
    """Decode rounds of the whole engine in a leg: its own counters (the smallest stated one), else what its answers claim."""
    stated = [leg.counters.get(name, 0.0) for name in ("round_batches", "target_forwards", "rounds")]
    if any(stated):
        return min(value for value in stated if value > 0.0)
    return float(sum(g.rounds or 0 for g in leg.generations)) / max(leg.concurrency, 1)


def check_counters_exist(claim: Claim, leg: Leg) -> Check:
    """Each claimed counter is one that the engine states after it has decoded a little.

    A misspelt name proves nothing, however long the engine is timed: asked of the warm-up, before the first pair.
    """
    unknown = [counter for counter in claim.counters if counter not in leg.counters]
    told = ", ".join(f"'{counter}'" for counter in unknown)
    return Check(
        name="engagement.counters-exist",
        passed=not unknown,
        detail=f"the engine has no counter {told}; it states: {', '.join(sorted(leg.counters)) or 'none'}"
        if unknown
        else f"{len(claim.counters)} claimed",
    )


def check_engaged(claim: Claim, legs: Sequence[Leg], share: float) -> Check:
    """Each claimed counter grew in every timed candidate leg, `share` times per decode round or more over all of them.

    Per leg as well as in sum: code that runs for the first requests only is found by the leg in which it did not.
    """
    name = "engagement.claimed"
    if not claim.counters:
        return Check(name=name, passed=True, detail="the claim names no counter")
    told = []
    for counter in claim.counters:
        for index, leg in enumerate(legs):
            if not leg.counters.get(counter, 0.0) > 0.0:
                missing = "did not grow" if counter in leg.counters else "does not exist"
                return Check(
                    name=name,
                    passed=False,
                    detail=f"counter '{counter}' {missing} in timed leg {index + 1} of {len(legs)}",
                )
        grown = sum(leg.counters[counter] for leg in legs)
        rounds = sum(leg_rounds(leg) for leg in legs)
        if grown < share * rounds:
            detail = f"counter '{counter}' grew by {grown:.0f} over {rounds:.0f} decode rounds, less than {share:g} per round"
            return Check(name=name, passed=False, detail=detail)
        told.append(f"{counter} +{grown:.0f}")
    return Check(name=name, passed=True, detail=", ".join(told))


def check_no_fallback(claim: Claim, legs: Sequence[Leg]) -> Check:
    """Counters that the claim forbids, and any counter whose name says fallback, did not move."""
    name = "engagement.fallback"
    for index, leg in enumerate(legs):
        for counter, grown in leg.counters.items():
            if grown != 0.0 and (
                counter in claim.forbidden_counters or "fallback" in counter or "fell_back" in counter
            ):
                return Check(
                    name=name, passed=False, detail=f"counter '{counter}' grew by {grown:.0f} in timed leg {index + 1}"
                )
    unknown = [c for c in claim.forbidden_counters if legs and all(c not in leg.counters for leg in legs)]
    detail = "no fallback" + (f"; the engine has no counter {', '.join(unknown)}" if unknown else "")
    return Check(name=name, passed=True, detail=detail)


def admits_no_speculation(claim: Claim) -> bool:
    """The claim itself says that it serves without speculation."""
    said = f"{claim.component} {claim.hypothesis}".lower()
    return "no-speculation" in said or "speculation off" in said or "speculation-off" in said


def target_forwards_per_token(legs: Sequence[Leg]) -> float | None:
    """Target forwards per counted token over legs; None when the engine does not count its forwards."""
    forwards = sum(leg.counters.get("target_forwards", 0.0) for leg in legs)
    tokens = sum(len(g.output_ids) for leg in legs for g in leg.generations)
    return forwards / tokens if forwards and tokens else None


def check_speculation(claim: Claim, base: Sequence[Leg], candidate: Sequence[Leg], off_length: float) -> Check:
    """A candidate of a speculating base still speculates: accepted length above `off_length`.

    Accepted length comes from counted ids over claimed rounds; it is stored with the target forwards per token either way.
    """
    name = "engagement.speculation"
    before, after = accepted_length(base), accepted_length(candidate)
    forwards = target_forwards_per_token(candidate)
    told = (
        f"accepted length {_shown(before)} -> {_shown(after)}, target forwards per token "
        f"{_shown(target_forwards_per_token(base))} -> {_shown(forwards)}"
    )
    if before is None or before <= off_length or admits_no_speculation(claim):
        return Check(name=name, passed=True, detail=told)
    return Check(name=name, passed=after is not None and after > off_length, detail=told)


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
