"""Everything of a transformer layer that is not a weight matrix, as plain functions. No state, no model knowledge."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from slim_engine.config import RopeConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [..., D] float32; weight broadcasts against it. Returns float32."""
    if x.dim() == 2 and x.shape[0] == 1:  # one row: a dot product and two multiplications instead of five small kernels
        row = x[0]
        scale = (float(torch.dot(row, row)) / row.shape[0] + eps) ** -0.5
        return (x * weight).mul_(scale)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps)) * weight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up [M, 2I], gate first; returns [M, I] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [length, head_dim] float32. The first half of sin is negated, so that `apply_rope` needs one roll and no concatenation."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.factor is not None:
        frequency = _llama3_scaling(frequency, rope)
    angle = torch.outer(torch.arange(length).float(), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates halves. x [M, heads, D]; cos, sin [M, 1, D] of `rope_table` at the rows' positions. Returns float32."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool = False
) -> torch.Tensor:
    """Grouped-query attention of one request.

    q [n, heads, D]; k, v [kv_heads, L, D]; mask [n, L] float32 added to the scores (0 or -inf), None: all visible; causal: n == L, lower
    triangle. Softmax scale 1/sqrt(D). Returns [n, heads * D] float32.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)


def causal_mask(rows: int, past: int) -> torch.Tensor:
    """[rows, past + rows]: row i sees the past and the rows up to itself."""
    mask = torch.zeros(rows, past + rows)
    mask[:, past:].fill_(float("-inf")).triu_(1)
    return mask


def block_mask(rows: int, past: int, causal: bool, window: int | None) -> torch.Tensor | None:
    """Mask of a draft block after `past` context tokens, or None if every row sees everything.

    Visible iff (not causal or key <= query) and query - key < window and, when not causal, key - query < window.
    """
    if not causal and (window is None or past + rows <= window):
        return None
    distance = torch.arange(past, past + rows).unsqueeze(1) - torch.arange(past + rows).unsqueeze(0)
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance >= window) | (distance <= -window)
    return torch.zeros(rows, past + rows).masked_fill_(hidden, float("-inf"))


def _llama3_scaling(frequency: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    assert rope.factor is not None
    turns = rope.original_max_position * frequency / (2 * torch.pi)  # rotations within the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequency / rope.factor + blend * frequency
