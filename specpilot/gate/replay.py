"""Stored answers: a repeated prompt must cost what it cost the first time, because caches were flushed between.

Pure judgement of a recorded probe. One hidden prompt is asked, then a near copy of it, then the same again twice;
an engine that keeps answers (or keeps them as drafts) is faster, or needs fewer rounds, on what it has seen.
"""

from __future__ import annotations

from statistics import median

from specpilot.contracts import Check, Generation
from specpilot.gate.records import GatePolicy, ReplayProbe


def seconds_per_token(generation: Generation) -> float:
    """Seconds from submission to end per counted token (infinite for an empty answer)."""
    tokens = len(generation.output_ids)
    return (generation.last_s - generation.submitted_s) / tokens if tokens else float("inf")


def check_replay(probe: ReplayProbe, policy: GatePolicy) -> Check:
    """Repeats cost what the first time did.

    `probe.fresh[0]`: the prompt for the first time; `probe.repeated`: the same again. Refused: even the slowest repeat is
    more than `replay_speedup` times faster per token, or the repeats claim less than `replay_rounds` of its decode rounds (and
    three or more fewer). The near copy in `probe.fresh` has another answer and so another accepted length: it is not
    timed; its tokens are forced, which finds answers stored under a fuzzy key.
    """
    name = "replay"
    first = seconds_per_token(probe.fresh[0])
    again = max(seconds_per_token(g) for g in probe.repeated)
    told = f"first time {first * 1e3:.2f} ms per token, repeated {again * 1e3:.2f}"
    if again * policy.replay_speedup < first:
        return Check(name=name, passed=False, detail=told)
    rounds = probe.fresh[0].rounds
    repeats = [g.rounds for g in probe.repeated if g.rounds is not None]
    if rounds and repeats:
        told += f"; decode rounds {rounds}, repeated {repeats}"
        if median(repeats) < policy.replay_rounds * rounds and rounds - median(repeats) >= 3:
            return Check(name=name, passed=False, detail=told)
    return Check(name=name, passed=True, detail=told)
