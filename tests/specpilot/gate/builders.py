"""Builders of evidence records for the gate's tests: plain values, no engine."""

from __future__ import annotations

from typing import Any

from specpilot.contracts import Candidate, Claim, Generation, Leg
from specpilot.evaluation.client import Position
from specpilot.gate.records import HiddenPass


def position(token: int, top_token: int, gap: float, index: int = 0) -> Position:
    """A scored position whose argmax has log-probability -0.5."""
    return Position(
        index=index,
        token=token,
        token_logprob=-0.5 - gap,
        top_token=top_token,
        top_logprob=-0.5,
        gap=gap,
        top=[(top_token, -0.5), (token, -0.5 - gap)],
    )


def generation(output: list[int], prompt_id: str = "p0", **changes: Any) -> Generation:
    """An answer that arrived one token per 10 ms from t = 1 s on, by length."""
    values: dict[str, Any] = {
        "prompt_id": prompt_id,
        "prompt_ids": [1, 2, 3],
        "output_ids": output,
        "submitted_s": 0.9,
        "first_s": 1.0,
        "last_s": 1.0 + 0.01 * max(len(output) - 1, 1),
        "first_chunk_tokens": min(len(output), 1),
        "claimed_tokens": len(output),
        "finish_reason": "length",
        "rounds": max(len(output) - 1, 0),
    }
    return Generation(**(values | changes))


def leg(generations: list[Generation], side: str = "candidate", **changes: Any) -> Leg:
    """A leg at concurrency 1 whose counters agree with its answers."""
    rounds = sum(g.rounds or 0 for g in generations)
    committed = sum(max(len(g.output_ids) - 1, 0) for g in generations)
    values: dict[str, Any] = {
        "side": side,
        "commit": "c1" if side == "candidate" else "b0",
        "variant": "final",
        "concurrency": 1,
        "generations": generations,
        "wall_s": sum(g.last_s - g.submitted_s for g in generations),
        "counters": {
            "rounds": rounds,
            "round_batches": rounds,
            "target_forwards": rounds,
            "committed_tokens": committed,
        },
    }
    return Leg(**(values | changes))


def claim(**changes: Any) -> Claim:
    """A claim on the output head without counters."""
    return Claim(**({"component": "target.head", "hypothesis": "fewer bytes"} | changes))


def candidate(**changes: Any) -> Candidate:
    """Commit c1 on b0."""
    values: dict[str, Any] = {
        "attempt_id": "a1",
        "worker": "test",
        "base_commit": "b0",
        "commit": "c1",
        "branch": "specpilot/a1",
        "claim": claim(),
    }
    return Candidate(**(values | changes))


def hidden(**changes: Any) -> HiddenPass:
    """A pass of one answer of four tokens, block size 8, stop token 0."""
    values: dict[str, Any] = {
        "legs": [leg([generation([11, 12, 13, 14], "h0")])],
        "requested_tokens": 4,
        "natural_limit": 6,
        "eos_token_ids": [0],
        "block_size": 8,
        "startup_s": 3.0,
    }
    return HiddenPass(**(values | changes))
