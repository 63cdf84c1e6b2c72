"""The DFlash drafter as a trainable module; parameter names are the tensor names of the published format.

Architecture: facts of DFlash (arXiv 2602.06036). Context K/V come from a projection of tapped target states, block
tokens attend to the context before their anchor and to each other in both directions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from target import rotary_tables, rotate
from torch import Tensor, nn


@dataclass(frozen=True)
class DrafterShape:
    """Shape and format fields of a drafter; `tap_ids` are 0-based decoder layers of the target."""

    hidden: int = 576
    layers: int = 3
    intermediate: int = 1024
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    eps: float = 1e-5
    theta: float = 100000.0
    vocabulary: int = 49152
    max_positions: int = 8192
    block_size: int = 8
    mask_token_id: int = 4
    target_layers: int = 30
    tap_ids: tuple[int, ...] = (1, 8, 15, 22, 28)

    def config(self) -> dict[str, Any]:
        """The `config.json` of the published DFlash format."""
        return {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "bos_token_id": 1,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.tap_ids)},
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "is_causal": False,
            "layer_types": ["full_attention"] * self.layers,
            "max_position_embeddings": self.max_positions,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": self.eps,
            "rope_scaling": None,
            "rope_theta": self.theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }


class Norm(nn.Module):
    """RMSNorm with a plain weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def _linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class BlockAttention(nn.Module):
    """Attention of block tokens over the context before their anchor and over their own block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = _linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = _linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = _linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = _linear(shape.heads * shape.head_dim, shape.hidden, 0.02 / (2 * shape.layers) ** 0.5)
        self.q_norm, self.k_norm = Norm(shape.head_dim, shape.eps), Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, context: Tensor, hidden_from: Tensor, rope_context: Rope, rope_block: Rope) -> Tensor:
        """x [S, A, B, H], context [S, L, H], hidden_from [S, A] (first context position a block may not see)."""
        s = self.shape
        sequences, anchors, block, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (s.heads, s.head_dim))), *rope_block)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))), *rope_block)
        v = self.v_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))
        k_context = rotate(self.k_norm(self.k_proj(context).unflatten(-1, (s.kv_heads, s.head_dim))), *rope_context)
        v_context = self.v_proj(context).unflatten(-1, (s.kv_heads, s.head_dim))
        group = s.heads // s.kv_heads
        # queries [S, kv, A, group * B, d]: rows of one block share their mask
        q = q.unflatten(-2, (s.kv_heads, group)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4) * s.head_dim**-0.5
        k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 3, 1, 2, 4)  # [S, kv, A, B, d]
        k_context, v_context = k_context.transpose(1, 2), v_context.transpose(1, 2)  # [S, kv, L, d]
        length = context.shape[1]
        over_context = (q.flatten(2, 3) @ k_context.transpose(-1, -2)).unflatten(2, (anchors, group * block))
        visible = torch.arange(length, device=x.device) < hidden_from[:, :, None]
        over_context = over_context.masked_fill(~visible[:, None, :, None], float("-inf"))
        scores = torch.cat([over_context, q @ k.transpose(-1, -2)], dim=-1)
        weights = scores.float().softmax(-1).to(v.dtype)
        on_context, on_block = weights.split([length, block], dim=-1)
        out = (on_context.flatten(2, 3) @ v_context).unflatten(2, (anchors, group * block)) + on_block @ v
        out = out.unflatten(3, (group, block)).permute(0, 2, 4, 1, 3, 5).flatten(3)  # [S, A, B, heads * d]
        return self.o_proj(out)


Rope = tuple[Tensor, Tensor]


class BlockMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden, shape.intermediate)
        self.up_proj = _linear(shape.hidden, shape.intermediate)
        self.down_proj = _linear(shape.intermediate, shape.hidden, 0.02 / (2 * shape.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm layer; the context is not normalised by `input_layernorm`."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = BlockMlp(shape)

    def forward(self, x: Tensor, context: Tensor, hidden_from: Tensor, rope_context: Rope, rope_block: Rope) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, hidden_from, rope_context, rope_block)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Tapped target states and block tokens in, final-normed hidden states of the draft slots out."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(len(shape.tap_ids) * shape.hidden, shape.hidden)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)

    def forward(
        self, taps: Tensor, anchor_embedding: Tensor, mask_embedding: Tensor, anchors: Tensor, tables: Rope
    ) -> Tensor:
        """Draft states [S, A, B-1, H] of slots 1..B-1.

        taps [S, L, T*H], anchor_embedding [S, A, H] (target's row of the anchor token), mask_embedding [H],
        anchors [S, A] (position of the anchor token; context before it is visible), tables: cos and sin [P, d].
        """
        block = self.shape.block_size
        context = self.hidden_norm(self.fc(taps))
        positions = anchors[..., None] + torch.arange(block, device=anchors.device)
        cos, sin = tables
        rope_block = (cos[positions][..., None, :], sin[positions][..., None, :])
        rope_context = (cos[: taps.shape[1], None], sin[: taps.shape[1], None])
        masks = mask_embedding.expand(*anchors.shape, block - 1, -1)
        x = torch.cat([anchor_embedding[:, :, None], masks], dim=2)
        for layer in self.layers:
            x = layer(x, context, anchors, rope_context, rope_block)
        return self.norm(x[:, :, 1:])

    def tables(self, positions: int, device: torch.device, dtype: torch.dtype) -> Rope:
        """cos and sin tables for `positions` positions."""
        return rotary_tables(positions, self.shape.head_dim, self.shape.theta, device, dtype)

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (BF16) in the published DFlash format."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.shape.config(), indent=2) + "\n")
