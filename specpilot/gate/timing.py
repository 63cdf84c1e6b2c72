"""Times that cannot be, and gains that were moved elsewhere.

Pure functions on recorded legs and a comparison. The clock that made them is the evaluator's; what is checked
here is that the times respect physics and that a decode gain was not paid for in prefill, start-up or queueing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from specpilot.contracts import Check, Comparison, Generation, Leg
from specpilot.gate.accounting import fewest_rounds
from specpilot.gate.records import GatePolicy, TimeFloor


def rounds_after_first(generation: Generation, block_size: int) -> int:
    """Decode rounds that must lie between the first chunk and the end.

    At least ceil(decoded/block_size); more if the engine claims more rounds: then its share of the tokens
    decoded after the first chunk, less one round of doubt about where the first chunk fell.
    """
    fewest = fewest_rounds(generation.decoded + 1, block_size)
    if not generation.rounds or not generation.output_ids:
        return fewest
    claimed = int(generation.rounds * generation.decoded / len(generation.output_ids)) - 1
    return max(fewest, claimed)


def check_possible(generations: Sequence[Generation], block_size: int, floor: TimeFloor | None, slack: float) -> Check:
    """No answer was decoded faster than its rounds can physically take, and time runs forward.

    `floor.round_s` seconds per round, `slack` a share. Holds at any concurrency: batching shares a round, it does
    not shorten it. Without a floor only order and positive length of the times are checked.
    """
    name = "timing.possible"
    closest = float("inf")
    for g in generations:
        if not g.submitted_s <= g.first_s <= g.last_s or not g.last_s > g.submitted_s:
            return Check(name=name, passed=False, detail=f"{g.prompt_id}: times do not run forward")
        rounds = rounds_after_first(g, block_size)
        if floor is None or floor.round_s <= 0.0 or rounds == 0:
            continue
        least = rounds * floor.round_s
        closest = min(closest, g.decode_s / least)
        if g.decode_s * (1.0 + slack) < least:
            detail = (
                f"{g.prompt_id}: {g.decoded} tokens after the first chunk took {g.decode_s * 1e3:.2f} ms; "
                f"{rounds} rounds need {least * 1e3:.2f} ms ({floor.source or 'cost model'})"
            )
            return Check(name=name, passed=False, detail=detail)
    detail = (
        "no floor given"
        if floor is None
        else f"{len(generations)} answers, closest to the floor: {closest:.2f} times it"
    )
    return Check(name=name, passed=True, detail=detail)


def check_end_to_end(comparison: Comparison) -> Check:
    """A decode gain is not a loss from submission to end: that would be work moved into prefill or queueing."""
    lost = comparison.low > 1.0 and comparison.end_to_end_high < 1.0
    detail = (
        f"decode ratio {comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}], end to end "
        f"{comparison.end_to_end_ratio:.3f} [{comparison.end_to_end_low:.3f}, {comparison.end_to_end_high:.3f}]"
    )
    return Check(name="timing.end-to-end", passed=not lost, detail=detail)


def check_first_token(base: Sequence[Leg], candidate: Sequence[Leg]) -> Check:
    """Decode time was not moved to before the first token.

    Medians over the prompts that both sides answered. Refused when decoding got faster by a tenth or more, the first token
    comes later by over half of what decoding saved, and that is over half of the base's own time to the first token (less
    is noise of a busy machine; a comparison weighs it in its end-to-end interval).
    """
    name = "timing.first-token"
    before = {g.prompt_id: g for leg in base for g in leg.generations}
    pairs = [(before[g.prompt_id], g) for leg in candidate for g in leg.generations if g.prompt_id in before]
    if not pairs:
        return Check(name=name, passed=True, detail="no prompt was answered by both sides")
    first = median(b.first_s - b.submitted_s for b, _ in pairs)
    decode = median(b.decode_s for b, _ in pairs)
    saved = median(b.decode_s - c.decode_s for b, c in pairs)
    later = median((c.first_s - c.submitted_s) - (b.first_s - b.submitted_s) for b, c in pairs)
    moved = saved >= 0.1 * decode and later > 0.5 * saved and later > 0.5 * first
    detail = f"per answer: decoding {decode:.3f} s, {saved:+.3f} s saved; first token after {first:.3f} s, {later:+.3f} s later"
    return Check(name=name, passed=not moved, detail=detail)


def check_startup(base_s: float, candidate_s: float, policy: GatePolicy) -> Check:
    """Start-up stays within `startup_factor` times the base's plus `startup_slack_s` seconds (a compiler may run)."""
    limit = policy.startup_factor * base_s + policy.startup_slack_s
    detail = f"start-up {candidate_s:.1f} s, base {base_s:.1f} s, limit {limit:.1f} s"
    return Check(name="timing.start-up", passed=candidate_s <= limit, detail=detail)


def in_flight(leg: Leg) -> float:
    """Mean number of requests between their first and last token, over the time in which any was.

    A leg at concurrency c that really serves c at once has about c in flight until its tail.
    """
    spans = sorted((g.first_s, g.last_s) for g in leg.generations)
    busy, reach = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return sum(end - start for start, end in spans) / busy if busy > 0.0 else 0.0


def check_admission(leg: Leg, served_at_once: float, share: float) -> Check:
    """At concurrency above 1 the requests really run together, rather than one after another.

    `served_at_once`: how many the base had in flight under the same load, or any engine is sure to serve. A queue that
    holds requests back makes each one's decode rate look better than the offered load allows.
    """
    name = "timing.admission"
    offered = min(leg.concurrency, len(leg.generations), served_at_once)
    if share * offered <= 1.0:
        return Check(name=name, passed=True, detail=f"{offered:.2f} requests at a time: too few for a queue to show")
    flying = in_flight(leg)
    detail = f"concurrency {leg.concurrency}: {flying:.2f} requests in flight, {offered:.2f} expected"
    return Check(name=name, passed=flying >= share * offered, detail=detail)
