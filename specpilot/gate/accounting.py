"""Token accounting: the evaluator's own count of token ids against what the engine says about itself.

Pure functions on recorded generations and legs. The counted ids are the truth; a claim that differs is a
finding, whatever it would have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specpilot.contracts import Check, Generation, Leg


def check_claimed_tokens(generations: Sequence[Generation]) -> Check:
    """`completion_tokens` of each answer equals the number of ids that arrived."""
    wrong = [g for g in generations if g.claimed_tokens != len(g.output_ids)]
    if wrong:
        g = wrong[0]
        detail = (
            f"{len(wrong)} of {len(generations)} answers claim another number of tokens than arrived; "
            f"{g.prompt_id}: claims {g.claimed_tokens}, {len(g.output_ids)} arrived"
        )
        return Check(name="accounting.tokens", passed=False, detail=detail)
    return Check(name="accounting.tokens", passed=True, detail=f"{len(generations)} answers, claims equal counts")


def fewest_rounds(tokens: int, block_size: int) -> int:
    """Fewest decode rounds that can commit `tokens`, the first of which may come from prefill."""
    return math.ceil(max(tokens - 1, 0) / max(block_size, 1))


def check_rounds(generations: Sequence[Generation], block_size: int) -> Check:
    """Claimed decode rounds are possible: at least ceil((tokens-1)/block), at most one per token.

    A round commits at most `block_size` tokens (block_size-1 drafts and the bonus) and at least one. Answers without
    claimed rounds are skipped.
    """
    for g in generations:
        if g.rounds is None:
            continue
        tokens = len(g.output_ids)
        fewest = fewest_rounds(tokens, block_size)
        if not fewest <= g.rounds <= max(tokens, 0):
            detail = (
                f"{g.prompt_id}: {g.rounds} rounds claimed for {tokens} tokens at block size {block_size}; "
                f"possible is {fewest} to {tokens}"
            )
            return Check(name="accounting.rounds", passed=False, detail=detail)
    told = sum(g.rounds is not None for g in generations)
    return Check(
        name="accounting.rounds", passed=True, detail=f"{told} of {len(generations)} answers state rounds, all possible"
    )


def check_committed(leg: Leg, block_size: int) -> Check:
    """The engine's own `committed_tokens` counter grew by about what was counted.

    The first token of an answer may come from prefill and not count as committed in a round; tokens that a
    round commits beyond the requested length are cut. So growth may differ by a block per request, not more.
    """
    name = "accounting.committed"
    grown = leg.counters.get("committed_tokens")
    if grown is None:
        return Check(name=name, passed=True, detail="the engine keeps no committed_tokens counter")
    counted = sum(len(g.output_ids) for g in leg.generations)
    answers = len(leg.generations)
    passed = counted - answers <= grown <= counted + block_size * answers
    detail = f"{leg.side} at concurrency {leg.concurrency}: counter grew by {grown:.0f}, {counted} tokens counted in {answers} answers"
    return Check(name=name, passed=passed, detail=detail)


def check_first_chunk(generations: Sequence[Generation], block_size: int) -> Check:
    """The first streamed chunk holds at most one round's tokens plus the one from prefill.

    Decode time starts at the first chunk: an engine that holds tokens back until then shortens the decode time it is
    measured by (lazy output, work moved into prefill).
    """
    limit = block_size + 1
    for g in generations:
        if g.first_chunk_tokens > limit:
            detail = (
                f"{g.prompt_id}: first chunk has {g.first_chunk_tokens} tokens, a round commits at most {block_size}"
            )
            return Check(name="accounting.first-chunk", passed=False, detail=detail)
    return Check(name="accounting.first-chunk", passed=True, detail=f"no first chunk above {limit} tokens")
