"""Token forcing: is every token a candidate emitted the one the target would have chosen there?

Each answer is fed to the reference in one teacher-forced pass. A position is *exact* when the emitted
token is the reference's argmax (the first index wins a tie), a *near-tie* when its log-probability lies within epsilon nats
of the argmax's, a *violation* otherwise. After a near-tie the rest is judged under the answer's own prefix, which is
what separates rounding from a lossy engine; a text diff cannot. Method: docs/gate.md.

The candidate is never asked to score anything, so there is no "being checked" for it to notice. This module
talks to the reference only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from specpilot.contracts import Generation
from specpilot.gate.errors import EvidenceError
from specpilot.gate.records import ForcedSequence, ForcingTally


class ScoredPosition(Protocol):
    """What the reference says about one forced position."""

    @property
    def token(self) -> int: ...
    @property
    def top_token(self) -> int: ...
    @property
    def gap(self) -> float: ...


class Scorer(Protocol):
    """The part of the evaluation client that the gate needs of the reference."""

    def score(self, ids: list[int], start: int, top: int = 2) -> Sequence[Any]:
        """One entry per token of `ids[start:]`."""
        ...


def classify(position: ScoredPosition, epsilon: float) -> str:
    """`exact`, `near-tie` or `violation`. A gap that is NaN, infinite or negative is a violation even on the argmax."""
    gap = position.gap
    if not math.isfinite(gap) or gap < 0.0:
        return "violation"
    if position.token == position.top_token:
        return "exact"
    return "near-tie" if gap <= epsilon else "violation"


def tally_sequence(generation: Generation, positions: Sequence[ScoredPosition], epsilon: float) -> ForcedSequence:
    """Classify every position of one answer.

    Raises EvidenceError when the reference scored other tokens than the answer's: that is a fault of the evaluation, never
    of the candidate.
    """
    _check_alignment(generation, positions)
    kinds = [classify(position, epsilon) for position in positions]
    finite = [position.gap for position in positions if math.isfinite(position.gap)]
    first = kinds.index("violation") if "violation" in kinds else None
    note = ""
    if first is not None:
        bad = positions[first]
        note = f"emitted {bad.token}, reference {bad.top_token}, gap {bad.gap:.4f} nats"
    return ForcedSequence(
        prompt_id=generation.prompt_id,
        positions=len(kinds),
        exact=kinds.count("exact"),
        near_ties=kinds.count("near-tie"),
        violations=kinds.count("violation"),
        max_gap=max(finite, default=0.0),
        first_violation=first,
        first_violation_note=note,
        near_tie_gaps=[p.gap for p, kind in zip(positions, kinds, strict=True) if kind == "near-tie"],
    )


def _check_alignment(generation: Generation, positions: Sequence[ScoredPosition]) -> None:
    if len(positions) != len(generation.output_ids):
        raise EvidenceError(
            f"the reference scored {len(positions)} positions of {len(generation.output_ids)} for prompt {generation.prompt_id}",
            "the reference server does not return one log-probability per forced token; see its log",
        )
    for index, (position, token) in enumerate(zip(positions, generation.output_ids, strict=True)):
        if position.token != token:
            raise EvidenceError(
                f"the reference scored token {position.token} at output position {index} of prompt "
                f"{generation.prompt_id}, the answer has {token}",
                "the reference's positions are shifted; see its log",
            )


def summarise(sequences: Sequence[ForcedSequence], skipped: int = 0) -> ForcingTally:
    """Sum tallies of sequences."""
    return ForcingTally(
        sequences=list(sequences),
        positions=sum(s.positions for s in sequences),
        exact=sum(s.exact for s in sequences),
        near_ties=sum(s.near_ties for s in sequences),
        violations=sum(s.violations for s in sequences),
        max_gap=max((s.max_gap for s in sequences), default=0.0),
        skipped=skipped,
    )


def ends_first(generations: Iterable[Generation]) -> list[Generation]:
    """Order for scoring: last, first, then the others from the end, so that a late lapse is met early."""
    items = list(generations)
    if len(items) <= 2:
        return items[::-1]
    return [items[-1], items[0], *items[-2:0:-1]]


def score_generation(reference: Scorer, generation: Generation, top: int = 2) -> Sequence[Any]:
    """Positions of one answer through the reference; no request at all for an empty one."""
    if not generation.output_ids:
        return []
    return reference.score([*generation.prompt_ids, *generation.output_ids], len(generation.prompt_ids), top)


def force(
    reference: Scorer,
    generations: Iterable[Generation],
    epsilon: float,
    *,
    stop_after: int | None = None,
    parallel: int = 2,
    on_sequence: Callable[[ForcedSequence], None] | None = None,
) -> ForcingTally:
    """Force answers through one reference server, `parallel` requests at a time.

    `stop_after`: no further sequence is sent once that many violations are on record; the number of
    sequences left out is in the tally.
    """
    waiting = ends_first(generations)
    done: list[ForcedSequence] = []
    with ThreadPoolExecutor(max_workers=parallel) as pool:
        while waiting and not _enough(done, stop_after):
            batch, waiting = waiting[:parallel], waiting[parallel:]
            scored = pool.map(lambda g: (g, score_generation(reference, g)), batch)
            for generation, positions in scored:
                sequence = tally_sequence(generation, positions, epsilon)
                done.append(sequence)
                if on_sequence is not None:
                    on_sequence(sequence)
    return summarise(done, skipped=len(waiting))


def _enough(done: Sequence[ForcedSequence], stop_after: int | None) -> bool:
    return stop_after is not None and sum(s.violations for s in done) >= stop_after
