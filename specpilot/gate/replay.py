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
    """Repeats cost what the first time did, and so does the near copy.

    `probe.fresh`: the prompt for the first time, then a near copy of it; `probe.repeated`: the first again. Refused: the
    slowest repeat (or the near copy) more than `replay_speedup` times faster per token than the first time, or repeats that
    claim less than `replay_rounds` of its decode rounds (and three or more fewer).
    """
    name = "replay"
    first = seconds_per_token(probe.fresh[0])
    copies = [seconds_per_token(g) for g in probe.fresh[1:]]
    again = max(seconds_per_token(g) for g in probe.repeated)
    fastest = min([again, *copies])
    told = f"first time {first * 1e3:.2f} ms per token, repeated {again * 1e3:.2f}, near copy {_listed(copies)}"
    if fastest * policy.replay_speedup < first:
        return Check(name=name, passed=False, detail=told)
    rounds = probe.fresh[0].rounds
    repeats = [g.rounds for g in probe.repeated if g.rounds is not None]
    if rounds and repeats:
        told += f"; decode rounds {rounds}, repeated {repeats}"
        if median(repeats) < policy.replay_rounds * rounds and rounds - median(repeats) >= 3:
            return Check(name=name, passed=False, detail=told)
    return Check(name=name, passed=True, detail=told)


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value * 1e3:.2f}" for value in values) or "none"
