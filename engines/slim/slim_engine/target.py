"""The target: a dense Llama-family decoder (Llama, Qwen3), rows of several requests in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slim_engine import ops
from slim_engine.checkpoint import Weights
from slim_engine.config import ModelConfig, TargetConfig
from slim_engine.kv import KVCache, KVPool
from slim_engine.linear import Compute, Linear, make_linear
from slim_engine.profiling import mark


@dataclass(slots=True)
class Segment:
    """Consecutive tokens of one request; the first stands at position `cache.length`."""

    token_ids: list[int]
    cache: KVCache


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer. qkv: query, key and value rows stacked; gate_up: gate rows first."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None  # [heads + kv_heads, D], query heads first
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TargetModel:
    """forward() writes keys and values behind each cache's committed rows and does not commit them."""

    def __init__(self, folder: Path, config: TargetConfig, compute: Compute, pack_rows: int, max_len: int) -> None:
        self.config = config
        weights = Weights(folder)
        self.embedding = weights.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.head_weight = (
            self.embedding
            if config.tied_head
            else weights.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self.layers = [
            load_layer(weights, f"model.layers.{i}.", config, compute, pack_rows) for i in range(config.num_layers)
        ]
        self.norm = weights.vector("model.norm.weight", config.hidden_size)
        self.cos, self.sin = (t.unsqueeze(1) for t in ops.rope_table(config.rope, config.head_dim, max_len))
        self.pool = KVPool(config.num_layers, config.num_kv_heads, config.head_dim, max_len)

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        """[M, H] float32 embedding rows."""
        return self.embedding[torch.tensor(token_ids)].float()

    def forward(
        self, segments: Sequence[Segment], tap_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the segments' rows, concatenated in order (M in all).

        Returns the hidden states after the final norm [M, H] and the residual stream after the layers `tap_ids` side by side [M, T*H]
        (None without taps), both float32.
        """
        mark("target.embed")
        x = self.embed([token for segment in segments for token in segment.token_ids])
        cos, sin, masks = self._positions(segments)
        taps = torch.empty(len(x), len(tap_ids), self.config.hidden_size) if tap_ids else None
        for index, layer in enumerate(self.layers):
            x = self._layer(index, layer, x, segments, cos, sin, masks)
            if taps is not None and index in tap_ids:
                taps[:, [slot for slot, tap in enumerate(tap_ids) if tap == index]] = x.unsqueeze(1)  # an id may be listed twice
        mark("target.norm")
        hidden = ops.rms_norm(x, self.norm, self.config.rms_norm_eps)
        mark(None)
        return hidden, None if taps is None else taps.flatten(1)

    def _positions(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        spans = [(s.cache.length, s.cache.length + len(s.token_ids)) for s in segments]
        masks = [ops.causal_mask(b - a, a) if b - a > 1 and a > 0 else None for a, b in spans]
        if len(spans) == 1:
            a, b = spans[0]
            return self.cos[a:b], self.sin[a:b], masks
        return torch.cat([self.cos[a:b] for a, b in spans]), torch.cat([self.sin[a:b] for a, b in spans]), masks

    def _layer(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        segments: Sequence[Segment],
        cos: torch.Tensor,
        sin: torch.Tensor,
        masks: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        mark("target.norm")
        normed = ops.rms_norm(x, layer.input_norm, eps)
        mark("target.qkv")
        qkv = layer.qkv(normed)
        mark("target.attention")
        attended = self._attend(index, layer, qkv, segments, cos, sin, masks)
        mark("target.o")
        x.add_(layer.o(attended))
        mark("target.norm")
        normed = ops.rms_norm(x, layer.post_norm, eps)
        mark("target.mlp")
        return x.add_(layer.down(ops.swiglu(layer.gate_up(normed))))

    def _attend(
        self,
        index: int,
        layer: Layer,
        qkv: torch.Tensor,
        segments: Sequence[Segment],
        cos: torch.Tensor,
        sin: torch.Tensor,
        masks: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        rows = qkv.view(len(qkv), heads + 2 * kv_heads, config.head_dim)
        qk, v = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = ops.rms_norm(qk.float(), layer.qk_norm, config.rms_norm_eps)
        qk = ops.apply_rope(qk, cos, sin)
        q, k = qk[:, :heads], qk[:, heads:]
        outputs, start = [], 0
        for segment, mask in zip(segments, masks, strict=True):
            end = start + len(segment.token_ids)
            keys, values = segment.cache.put(index, k[start:end], v[start:end])
            outputs.append(ops.attention(q[start:end], keys, values, mask, causal=mask is None and end - start > 1))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def load_layer(weights: Weights, prefix: str, config: ModelConfig, compute: Compute, pack_rows: int) -> Layer:
    """One decoder layer with fused qkv and gate-up weights."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    a, m = prefix + "self_attn.", prefix + "mlp."

    def linear(name: str, *parts: torch.Tensor) -> Linear:
        return make_linear(torch.cat(parts) if len(parts) > 1 else parts[0], prefix + name, compute, pack_rows)

    qk_norm = None
    if config.qk_norm:
        qn, kn = weights.vector(a + "q_norm.weight", d), weights.vector(a + "k_norm.weight", d)
        qk_norm = torch.cat([qn.expand(config.num_heads, d), kn.expand(config.num_kv_heads, d)])
    return Layer(
        input_norm=weights.vector(prefix + "input_layernorm.weight", h),
        qkv=linear(
            "qkv",
            weights.matrix(a + "q_proj.weight", q, h),
            weights.matrix(a + "k_proj.weight", kv, h),
            weights.matrix(a + "v_proj.weight", kv, h),
        ),
        qk_norm=qk_norm,
        o=linear("o", weights.matrix(a + "o_proj.weight", h, q)),
        post_norm=weights.vector(prefix + "post_attention_layernorm.weight", h),
        gate_up=linear(
            "gate_up", weights.matrix(m + "gate_proj.weight", i, h), weights.matrix(m + "up_proj.weight", i, h)
        ),
        down=linear("down", weights.matrix(m + "down_proj.weight", h, i)),
    )
