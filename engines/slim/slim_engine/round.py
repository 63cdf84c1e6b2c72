"""One decode round of several requests: draft, verify, accept, commit. Autoregressive decoding is a round without drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slim_engine import profiling
from slim_engine.counters import COUNTERS
from slim_engine.drafting import Drafter, Proposal
from slim_engine.head import TargetHead, argmax_rows
from slim_engine.kv import KVCache
from slim_engine.policy import Policy
from slim_engine.profiling import mark
from slim_engine.request import Chunk, Request, TokenLogprob
from slim_engine.sampling import accept_greedy, accept_sampled, probabilities
from slim_engine.target import Segment, TargetModel


@dataclass
class Models:
    """What a round runs. drafter None: autoregressive."""

    target: TargetModel
    head: TargetHead
    drafter: Drafter | None
    policy: Policy


def decode_round(requests: Sequence[Request], models: Models) -> list[Chunk]:
    """Advances every request by at least one token and returns what each committed.

    Each request has a last committed token whose keys and values are not in its cache; on return the same holds one or more tokens later.
    """
    started = time.perf_counter_ns()
    proposals = _propose(requests, models)
    segments = [Segment([r.last_token, *p.tokens], _cache(r)) for r, p in zip(requests, proposals, strict=True)]
    context = sum(s.cache.length for s in segments) / len(segments)
    hidden, taps = models.target.forward(segments, models.drafter.tap_ids if models.drafter else ())
    runs, logits = _accept(requests, proposals, hidden, models.head)
    chunks, start = [], 0
    for request, proposal, run in zip(requests, proposals, runs, strict=True):
        rows = len(proposal.tokens) + 1
        kept = request.commit(run)
        _cache(request).length += len(kept)
        if models.drafter is not None and request.finish is None:
            models.drafter.observe(request, None if taps is None else taps[start : start + len(kept)])
        models.policy.observe(request, len(proposal.tokens), len(run) - 1)
        scored = [] if request.logprobs is None else token_logprobs(logits, start, kept, request.logprobs.top)
        chunks.append(Chunk(kept, scored, request.finish))
        request.rounds += 1
        request.committed += len(kept)
        COUNTERS.add("accepted_drafts", len(run) - 1)
        start += rows
    _count(requests, proposals, chunks, started, start, context)
    return chunks


def first_token(request: Request, hidden: torch.Tensor, head: TargetHead) -> Chunk:
    """Commits the token that follows the prompt. hidden [1, H]: the prompt's last row."""
    runs, logits = _accept([request], [Proposal([])], hidden, head)
    kept = request.commit(runs[0])
    scored = [] if request.logprobs is None else token_logprobs(logits, 0, kept, request.logprobs.top)
    return Chunk(kept, scored, request.finish)


def token_logprobs(logits: torch.Tensor | None, start: int, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probability of tokens[i] at row start + i of logits [M, V], with the `top` best there (best first, then lowest id)."""
    assert logits is not None
    if not tokens:
        return []
    logp = torch.log_softmax(logits[start : start + len(tokens)], -1)
    own = logp.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    if top == 0:
        return [TokenLogprob(t, v) for t, v in zip(tokens, own, strict=True)]
    values, ids = logp.topk(min(top, logp.shape[1]))
    ranked = [
        sorted(zip(v, i, strict=True), key=lambda e: (-e[0], e[1]))
        for v, i in zip(values.tolist(), ids.tolist(), strict=True)
    ]
    return [TokenLogprob(t, v, tuple(r)) for t, v, r in zip(tokens, own, ranked, strict=True)]


def _propose(requests: Sequence[Request], models: Models) -> list[Proposal]:
    if models.drafter is None:
        return [Proposal([]) for _ in requests]
    proposals = models.drafter.propose(requests, models.policy.draft_counts(requests))
    counts = models.policy.verify_counts(requests, proposals)
    return [
        p if n == len(p.tokens) else Proposal(p.tokens[:n], None if p.q is None else p.q[:n])
        for p, n in zip(proposals, counts, strict=True)
    ]


def _accept(
    requests: Sequence[Request], proposals: Sequence[Proposal], hidden: torch.Tensor, head: TargetHead
) -> tuple[list[list[int]], torch.Tensor | None]:
    """Committed run of each request (before stop rules), and the logits [M, V] if any request needs more than the argmax."""
    if all(r.params.greedy and r.logprobs is None for r in requests):
        logits, best = None, head.argmax(hidden)
    else:
        logits = head.logits(hidden)
        best = argmax_rows(logits)
    mark("sample")
    runs, start = [], 0
    for request, proposal in zip(requests, proposals, strict=True):
        end = start + len(proposal.tokens) + 1
        if request.params.greedy:
            runs.append(accept_greedy(proposal.tokens, best[start:end]))
        else:
            assert logits is not None
            p = probabilities(logits[start:end], request.params)
            runs.append(accept_sampled(proposal.tokens, proposal.q, p, request.generator))
        start = end
    mark(None)
    return runs, logits


def _count(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    chunks: Sequence[Chunk],
    started: int,
    rows: int,
    context: float,
) -> None:
    committed = sum(len(c.token_ids) for c in chunks)
    COUNTERS.add("rounds", len(requests))
    COUNTERS.add("round_batches")
    COUNTERS.add("committed_tokens", committed)
    COUNTERS.add("target_forwards")
    COUNTERS.add("target_rows", rows)
    COUNTERS.add("drafted_tokens", sum(len(p.tokens) for p in proposals))
    profiling.event("round", started, rows=rows, committed=committed, context_len=context, requests=len(requests))


def _cache(request: Request) -> KVCache:
    assert request.cache is not None
    return request.cache
