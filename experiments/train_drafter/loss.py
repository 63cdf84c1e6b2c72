"""Cross-entropy against the target's frozen head, in chunks, with the gradient computed on the way forward.

The logits of one step would take gigabytes several times over; here one chunk exists at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunk_gradient(logits: Tensor, labels: Tensor, decay: Tensor, mix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy of one chunk.

    logits [n, K, V]; labels [n, K] (-1: no label); decay [K]. Slot weight: (1 - mix) * decay[k] + mix * sum over
    k' >= k of prod_{i <= k'} p_i, the exact gradient weight of the expected accepted length if drafts were sampled
    from p (d/d log p_k of sum_{k'} prod_{i <= k'} p_i); p is the probability of the label, held constant.
    Returns d loss / d logits [n, K, V] in the dtype of `logits`, the loss sum, and per-slot argmax hits [n, K].
    """
    valid = labels >= 0
    target = labels.clamp_min(0).long()
    full = logits.float()
    log_p = full.log_softmax(-1)
    picked = log_p.gather(-1, target[..., None])[..., 0]
    path = torch.where(valid, picked.exp(), 0.0).cumprod(-1)
    tail = path.flip(-1).cumsum(-1).flip(-1)
    weight = torch.where(valid, (1 - mix) * decay + mix * tail, 0.0)
    hits = (full.argmax(-1) == target) & valid
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    one_hot = (vocabulary == target[..., None]).float()
    gradient = (log_p.exp() - one_hot) * weight[..., None]
    return gradient.to(logits.dtype), -(weight * picked).sum(), hits


class HeadLoss(torch.autograd.Function):
    """loss, hits = HeadLoss.apply(states [N, K, H], head [V, H], labels [N, K], decay [K], mix, chunk, chunk_gradient)."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, labels: Tensor, decay: Tensor, mix: Tensor, chunk: int, gradient_of: Any
    ) -> Any:
        scale = 1.0 / ((labels >= 0) * decay).sum().clamp_min(1.0)
        gradient = torch.empty_like(states)
        loss = torch.zeros((), device=states.device)
        hits = torch.empty_like(labels, dtype=torch.bool)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            logits = states[part] @ head.t()
            grad_logits, part_loss, hits[part] = gradient_of(logits, labels[part], decay, mix)
            gradient[part] = (grad_logits.flatten(0, 1) @ head).view_as(states[part])
            loss = loss + part_loss
        ctx.save_for_backward(gradient * scale.to(gradient.dtype))
        ctx.mark_non_differentiable(hits)
        return loss * scale, hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None, None
