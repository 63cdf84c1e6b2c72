"""Sampling parameters, the target's sampling distribution, and exact rejection sampling of drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. temperature 0 is greedy; top_k 0 keeps every token; seed None draws a fresh one."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that `params` samples from: temperature, then the top_k logits, then the smallest top_p nucleus of what is left.

    logits [n, V] float32 -> [n, V] float32, rows sum to 1.
    """
    scaled = logits / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        floor = scaled.topk(params.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    probs = torch.softmax(scaled, -1)
    if params.top_p < 1.0:
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= params.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    """One index of `weights` [V] (>= 0, not all 0), with probability proportional to it; by inverting the cumulative sum."""
    cumulative = weights.double().cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, point, right=True))
    if index == len(weights):  # the product rounded up to the total
        index = int(weights.nonzero()[-1])
    return index


def accept_greedy(drafts: list[int], best: list[int]) -> list[int]:
    """Committed tokens of one round: the drafts that equal the target's argmax, then the target's own next token.

    best: argmax at the anchor and after each draft, len(drafts) + 1 tokens.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return [*drafts[:accepted], best[accepted]]


def accept_sampled(drafts: list[int], q: torch.Tensor | None, p: torch.Tensor, generator: torch.Generator) -> list[int]:
    """Exact rejection sampling: the committed tokens are distributed as samples from p, whatever q is.

    drafts: n tokens, drawn from q [n, V], or fixed ones (q None: all mass on the draft). p [n + 1, V]: target distributions at the anchor and
    after each draft. Accept draft d with probability min(1, p(d) / q(d)); the first rejection is replaced by a draw from max(p - q, 0);
    if all are accepted the last row of p gives the bonus token. Raises ValueError when p or q holds a value that is not finite: every comparison
    with NaN is false, so such a draft would be rejected in silence and the replacement drawn from nothing.
    """
    for name, rows in (("drafter's distribution q", q), ("target's distribution p", p)):
        if rows is not None and not bool(torch.isfinite(rows).all()):
            row = int((~torch.isfinite(rows)).any(-1).nonzero()[0])
            raise ValueError(f"the {name} is not finite at position {row}: its logits overflowed, or its weights are damaged")
    for index, token in enumerate(drafts):
        chance = torch.rand((), dtype=torch.float64, generator=generator).item()
        proposed = 1.0 if q is None else float(q[index, token])
        if chance * proposed < float(p[index, token]):
            continue
        if q is None:
            residual = p[index].clone()
            residual[token] = 0.0
        else:
            residual = (p[index] - q[index]).clamp_min_(0.0)
        if not bool(residual.any()):  # p and q agree but for rounding
            residual = p[index]
        return [*drafts[:index], draw(residual, generator)]
    return [*drafts, draw(p[len(drafts)], generator)]
