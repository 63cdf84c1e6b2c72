"""DFlash: one forward pass drafts a whole block.

The drafter has no embedding and no head: both are the target's. Its context is not tokens but the target's tapped hidden states: projected and
normalised once per committed token, they enter every draft layer as keys and values. A block is the last committed token followed by mask
tokens; slot j predicts the token at its own position. (Architecture: arXiv 2602.06036.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slim_engine import ops
from slim_engine.checkpoint import Weights
from slim_engine.config import DrafterConfig
from slim_engine.counters import COUNTERS
from slim_engine.draft_head import DraftHead
from slim_engine.drafting import Proposal
from slim_engine.kv import KVCache, KVPool
from slim_engine.linear import Compute, make_linear
from slim_engine.profiling import mark
from slim_engine.request import Request
from slim_engine.sampling import draw, probabilities
from slim_engine.target import Layer, TargetModel, load_layer


@dataclass(slots=True)
class DraftState:
    """Per request: keys and values of the committed context, and taps that are not in it yet."""

    cache: KVCache
    pending: list[torch.Tensor] = field(default_factory=list)


class DFlashDrafter:
    """See drafting.Drafter."""

    method = "dflash"

    def __init__(
        self,
        folder: Path,
        config: DrafterConfig,
        target: TargetModel,
        head: DraftHead,
        compute: Compute,
        pack_rows: int,
        max_len: int,
    ) -> None:
        self.config = config
        self.max_drafts = config.block_size - 1
        self.tap_ids = config.target_layer_ids
        self._target = target
        self._head = head
        self.trim_block = False  # tunable draft_only_verified
        weights = Weights(folder)
        h, d, kv_heads = config.hidden_size, config.head_dim, config.num_kv_heads
        self.fc = make_linear(weights.matrix("fc.weight", h, len(self.tap_ids) * h), "draft.fc", compute, pack_rows)
        self.hidden_norm = weights.vector("hidden_norm.weight", h)
        self.norm = weights.vector("norm.weight", h)
        kv = [
            weights.matrix(f"layers.{i}.self_attn.{p}_proj.weight", kv_heads * d, h)
            for i in range(config.num_layers)
            for p in ("k", "v")
        ]
        self.context_kv = make_linear(torch.cat(kv), "draft.context_kv", compute, pack_rows)
        k_norms = [weights.vector(f"layers.{i}.self_attn.k_norm.weight", d) for i in range(config.num_layers)]
        self.context_k_norm = torch.stack(k_norms).unsqueeze(1)  # [layers, 1, D]
        self.layers = [
            load_layer(weights, f"layers.{i}.", config, compute, pack_rows) for i in range(config.num_layers)
        ]
        length = max_len + config.block_size
        self.cos, self.sin = (t.unsqueeze(1) for t in ops.rope_table(config.rope, d, length))
        self._pool = KVPool(config.num_layers, kv_heads, d, length)

    def start(self, request: Request) -> None:
        request.draft_state = DraftState(self._pool.take())

    def finish(self, request: Request) -> None:
        if request.draft_state is not None:
            self._pool.give(request.draft_state.cache)
            request.draft_state = None

    def observe(self, request: Request, taps: torch.Tensor | None) -> None:
        assert taps is not None
        request.draft_state.pending.append(taps)

    def absorb(self, requests: Sequence[Request]) -> None:
        """Context keys and values of all layers for the pending taps: one fc, one norm and one fused K/V product for all requests."""
        states: list[DraftState] = [r.draft_state for r in requests if r.draft_state.pending]
        if not states:
            return
        config = self.config
        taps = [t for s in states for t in s.pending]
        mark("draft.fc")
        projected = self.fc(taps[0] if len(taps) == 1 else torch.cat(taps)).float()
        mark("draft.norm")
        context = ops.rms_norm(projected, self.hidden_norm, config.rms_norm_eps)
        mark("draft.kv")
        counts = [sum(len(t) for t in s.pending) for s in states]
        kv = (
            self.context_kv(context)
            .float()
            .view(len(context), config.num_layers, 2, config.num_kv_heads, config.head_dim)
        )
        k = ops.rms_norm(kv[:, :, 0], self.context_k_norm, config.rms_norm_eps)
        cos, sin = self._rows([(s.cache.length, s.cache.length + n) for s, n in zip(states, counts, strict=True)])
        k = ops.apply_rope(k, cos.unsqueeze(1), sin.unsqueeze(1))
        start = 0
        for state, count in zip(states, counts, strict=True):
            state.cache.append(k[start : start + count], kv[start : start + count, :, 1])
            state.pending.clear()
            start += count
        mark(None)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        self.absorb(requests)
        active = [(r, n) for r, n in zip(requests, counts, strict=True) if n > 0]
        if not active:
            return [Proposal([]) for _ in requests]
        sizes = [n + 1 if self.trim_block else self.config.block_size for _, n in active]
        hidden = self._forward([r for r, _ in active], sizes)
        COUNTERS.add("draft_forwards")
        rows, start = [], 0
        for (_, n), size in zip(active, sizes, strict=True):
            rows.append(hidden[start + 1 : start + 1 + n])
            start += size
        made = iter(self._pick([r for r, _ in active], rows))
        return [next(made) if n > 0 else Proposal([]) for n in counts]

    def _pick(self, requests: Sequence[Request], rows: Sequence[torch.Tensor]) -> list[Proposal]:
        """One head call for all rows; sampled requests draw their drafts, so that q is what they were drawn from."""
        together = rows[0] if len(rows) == 1 else torch.cat(list(rows))
        if all(r.params.greedy for r in requests):
            flat = iter(self._head.tokens(together))
            return [Proposal([next(flat) for _ in range(len(part))]) for part in rows]
        out = []
        for request, logits in zip(
            requests, self._head.logits(together).split([len(part) for part in rows]), strict=True
        ):
            if request.params.greedy:
                out.append(Proposal(logits.argmax(-1).tolist()))
            else:
                q = probabilities(logits, request.params)
                out.append(Proposal([draw(row, request.generator) for row in q], q))
        return out

    def _forward(self, requests: Sequence[Request], sizes: Sequence[int]) -> torch.Tensor:
        """Final-normed hidden states [sum(sizes), H] of one block per request. The block's own keys and values are left as scratch."""
        mark("draft.norm")
        config = self.config
        ids = [
            t for r, n in zip(requests, sizes, strict=True) for t in [r.last_token] + [config.mask_token_id] * (n - 1)
        ]
        x = self._target.embed(ids)
        if config.input_embedding_scale != 1.0:
            x = x * config.input_embedding_scale
        caches = [r.draft_state.cache for r in requests]
        cos, sin = self._rows([(c.length, c.length + n) for c, n in zip(caches, sizes, strict=True)])
        for index, layer in enumerate(self.layers):
            mark("draft.norm")
            normed = ops.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            mark("draft.qkv")
            qkv = layer.qkv(normed)
            mark("draft.attention")
            attended = self._attend(index, layer, qkv, caches, sizes, cos, sin)
            mark("draft.o")
            x = x.add_(layer.o(attended))
            mark("draft.norm")
            normed = ops.rms_norm(x, layer.post_norm, config.rms_norm_eps)
            mark("draft.mlp")
            x = x.add_(layer.down(ops.swiglu(layer.gate_up(normed))))
        mark("draft.norm")
        hidden = ops.rms_norm(x, self.norm, config.rms_norm_eps)
        mark(None)
        return hidden

    def _attend(
        self,
        index: int,
        layer: Layer,
        qkv: torch.Tensor,
        caches: Sequence[KVCache],
        sizes: Sequence[int],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        rows = qkv.view(len(qkv), heads + 2 * kv_heads, config.head_dim)
        assert layer.qk_norm is not None
        qk = ops.rms_norm(rows[:, : heads + kv_heads].float(), layer.qk_norm, config.rms_norm_eps)
        qk = ops.apply_rope(qk, cos, sin)
        outputs, start = [], 0
        for cache, size in zip(caches, sizes, strict=True):
            part = slice(start, start + size)
            keys, values = cache.put(index, qk[part, heads:], rows[part, heads + kv_heads :])
            mask = ops.block_mask(size, cache.length, config.causal[index], config.windows[index])
            outputs.append(ops.attention(qk[part, :heads], keys, values, mask))
            start += size
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rows(self, spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [M, 1, D] at the positions of `spans`."""
        if len(spans) == 1:
            a, b = spans[0]
            return self.cos[a:b], self.sin[a:b]
        return torch.cat([self.cos[a:b] for a, b in spans]), torch.cat([self.sin[a:b] for a, b in spans])
