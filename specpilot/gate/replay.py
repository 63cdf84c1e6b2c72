"""Stored answers: a repeated prompt must cost what it cost the first time, because caches were flushed between.

Pure judgement of a recorded probe. One hidden prompt is asked, then a near copy of it, then the same again twice;
an engine that keeps answers (or keeps them as drafts) is faster, or needs fewer rounds, on what it has seen.
"""

from __future__ import annotations

from statistics import median

from specpilot.contracts import Check, Generation
from specpilot.gate.records import GatePolicy, ReplayProbe


def seconds_per_round(generation: Generation) -> float:
    """Decode seconds per claimed round, or per token where no round is claimed. Unlike the time per token it does not
    depend on how many drafts a text lets through, so different answers compare."""
    return generation.decode_s / max(generation.rounds or generation.decoded, 1)


def check_replay(probe: ReplayProbe, policy: GatePolicy) -> Check:
    """Repeats cost what the first time did.

    `probe.fresh`: the prompt for the first time, then near copies of it; `probe.repeated`: the first again, asked between and
    after the copies. Refused: even the slowest repeat is more than `replay_speedup` times faster per round than the fastest
    fresh answer (so that a busy machine alone does not look like a store), or the repeats claim less than `replay_rounds`
    of the first time's rounds (and three or more fewer). Answers stored under a fuzzy key are found by forcing the copies.
    """
    name = "replay"
    fresh = min(seconds_per_round(g) for g in probe.fresh)
    again = max(seconds_per_round(g) for g in probe.repeated)
    told = f"fresh prompts took {fresh * 1e3:.2f} ms per round or more, the repeated one {again * 1e3:.2f} or less"
    if again * policy.replay_speedup < fresh:
        return Check(name=name, passed=False, detail=told)
    rounds = probe.fresh[0].rounds
    repeats = [g.rounds for g in probe.repeated if g.rounds is not None]
    if rounds and repeats:
        told += f"; decode rounds {rounds}, repeated {repeats}"
        if median(repeats) < policy.replay_rounds * rounds and rounds - median(repeats) >= 3:
            return Check(name=name, passed=False, detail=told)
    return Check(name=name, passed=True, detail=told)
