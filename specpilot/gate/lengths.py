"""Answers are complete: all requests answered, the asked number of tokens, stop rules kept.

Pure functions on recorded generations. That the stop token itself was the target's choice is a matter of token
forcing: on the natural-stop pass the emitted stop token is forced like any other, and so is every token that an engine put
where the target would have stopped. So lengths equal the reference's own, or differ after a near-tie.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specpilot.contracts import Check, Generation, Leg


def check_answered(asked: Collection[str], generations: Sequence[Generation]) -> Check:
    """Every prompt id in `asked` has exactly one answer with at least one token, and no other answers exist."""
    got = [g.prompt_id for g in generations]
    missing = sorted(set(asked) - set(got))
    empty = [g.prompt_id for g in generations if not g.output_ids]
    extra = sorted(set(got) - set(asked))
    if missing or empty or extra or len(got) != len(set(got)):
        detail = (
            f"{len(asked)} asked, {len(got)} answered; missing {missing[:3]}, empty {empty[:3]}, "
            f"not asked {extra[:3]}, repeated {len(got) - len(set(got))}"
        )
        return Check(name="lengths.answered", passed=False, detail=detail)
    return Check(name="lengths.answered", passed=True, detail=f"{len(asked)} asked, all answered")


def check_fixed_length(generations: Sequence[Generation], requested: int) -> Check:
    """With EOS ignored, every answer has exactly `requested` tokens and ends by length."""
    for g in generations:
        if len(g.output_ids) != requested or g.finish_reason != "length":
            detail = (
                f"{g.prompt_id}: {len(g.output_ids)} tokens, finish reason '{g.finish_reason}'; "
                f"asked for {requested} with the stop token ignored"
            )
            return Check(name="lengths.fixed", passed=False, detail=detail)
    return Check(name="lengths.fixed", passed=True, detail=f"{len(generations)} answers of {requested} tokens")


def check_known_tokens(generations: Sequence[Generation], vocab_size: int | None) -> Check:
    """Every id is one of the target's `vocab_size` tokens: the reference can not be asked about any other."""
    for g in generations:
        if vocab_size is not None and max(g.output_ids, default=0) >= vocab_size:
            detail = f"{g.prompt_id}: token {max(g.output_ids)}, the target knows {vocab_size}"
            return Check(name="lengths.known", passed=False, detail=detail)
    told = "vocabulary unknown" if vocab_size is None else f"all ids below {vocab_size}"
    return Check(name="lengths.known", passed=True, detail=told)


def check_same_lengths(base: Leg, candidate: Leg) -> Check:
    """The two sides of a timed pair answered the same prompts with the same number of tokens each."""
    want = {g.prompt_id: len(g.output_ids) for g in base.generations}
    got = {g.prompt_id: len(g.output_ids) for g in candidate.generations}
    if want != got:
        differing = sorted(k for k in want.keys() | got.keys() if want.get(k) != got.get(k))
        detail = f"{len(differing)} prompts differ, first {differing[0]}: base {want.get(differing[0])}, candidate {got.get(differing[0])}"
        return Check(name="lengths.paired", passed=False, detail=detail)
    return Check(name="lengths.paired", passed=True, detail=f"{len(want)} prompts, same lengths on both sides")


def stop_fault(generation: Generation, limit: int, eos: Collection[int]) -> str:
    """Empty when a natural-stop answer keeps the stop rules, else what is wrong.

    Rules: an answer that ends by `stop` ends in a stop token, one that ends by `length` has `limit` tokens, no stop token
    comes before the last place, and a stop token in the last place means `stop`.
    """
    ids = generation.output_ids
    early = next((i for i, token in enumerate(ids[:-1]) if token in eos), None)
    if early is not None:
        return f"goes on after the stop token at position {early}"
    ends_in_stop = bool(ids) and ids[-1] in eos
    if generation.finish_reason == "stop":
        return "" if ends_in_stop else f"says 'stop' after {len(ids)} tokens but its last token is no stop token"
    if generation.finish_reason != "length":
        return f"unknown finish reason '{generation.finish_reason}'"
    if ends_in_stop and len(ids) < limit:
        return "ends in a stop token but says 'length'"
    return "" if len(ids) == limit else f"says 'length' after {len(ids)} of {limit} tokens"


def check_natural_stops(generations: Sequence[Generation], limit: int, eos: Collection[int]) -> Check:
    """Every answer of the natural-stop pass keeps the stop rules of `stop_fault`."""
    for g in generations:
        fault = stop_fault(g, limit, eos)
        if fault:
            return Check(name="lengths.stop", passed=False, detail=f"{g.prompt_id}: {fault}")
    stopped = sum(g.finish_reason == "stop" for g in generations)
    return Check(
        name="lengths.stop",
        passed=True,
        detail=f"{stopped} of {len(generations)} answers stopped by themselves, rules kept",
    )
