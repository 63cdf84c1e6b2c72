"""The frozen Llama target as a few plain functions on tensors: prefill, decode and tapped hidden states.

Used by the data generator and the trainer. Written for throughput at large batch; the engine has its own model code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class TargetShape:
    """The numbers of a Llama `config.json` that the functions below need."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float


def rotary_tables(
    positions: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin tables [positions, head_dim] for rotary embedding in the rotate-half convention."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [..., head_dim]; cos and sin broadcast against it."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Target:
    """Weights of the target, fused where that saves launches, and its forward passes. Never trained."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, max_length: int = 2048) -> None:
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        self.shape = TargetShape(
            config["num_hidden_layers"], config["hidden_size"], heads, config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads, config["rms_norm_eps"], config["rope_theta"],
        )  # fmt: skip
        raw = {name: tensor.to(device, dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embed = raw["model.embed_tokens.weight"]
        self.head = raw.get("lm_head.weight", self.embed)
        self.final_norm = raw["model.norm.weight"]
        self.layers = [self._layer(raw, f"model.layers.{index}.") for index in range(self.shape.layers)]
        self.cos, self.sin = rotary_tables(max_length, self.shape.head_dim, self.shape.theta, device, dtype)

    @staticmethod
    def _layer(raw: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return {
            "norm1": raw[f"{prefix}input_layernorm.weight"],
            "norm2": raw[f"{prefix}post_attention_layernorm.weight"],
            "qkv": torch.cat([raw[f"{attention}{part}_proj.weight"] for part in "qkv"]),
            "o": raw[f"{attention}o_proj.weight"],
            "gate_up": torch.cat([raw[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]),
            "down": raw[f"{mlp}down_proj.weight"],
        }

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)

    def qkv(self, x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, T, heads, d] and k, and v [B, T, kv_heads, d], of normed x [B, T, H]; cos, sin [B or 1, T, 1, d]."""
        s = self.shape
        fused = F.linear(x, layer["qkv"]).unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_dim))
        q, k, v = fused.split([s.heads, s.kv_heads, s.kv_heads], dim=-2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def mlp(self, x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        """SwiGLU."""
        gate, up = F.linear(x, layer["gate_up"]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer["down"])

    def causal_layer(
        self, x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One decoder layer over whole sequences x [B, T, H]; returns x, k, v with k, v [B, kv_heads, T, d]."""
        s = self.shape
        q, k, v = self.qkv(self.norm(x, layer["norm1"]), layer, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        group = s.heads // s.kv_heads
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
        x = x + F.linear(attended.transpose(1, 2).flatten(2), layer["o"])
        return x + self.mlp(self.norm(x, layer["norm2"]), layer), k, v

    def taps(self, ids: Tensor, tap_ids: list[int]) -> Tensor:
        """Residual-stream outputs of decoder layers `tap_ids` side by side: ids [B, T] -> [B, T, len(tap_ids) * H].

        Padding must be on the right; it does not change what comes before it.
        """
        length = ids.shape[1]
        cos, sin = self.cos[None, :length, None], self.sin[None, :length, None]
        x, collected = self.embed[ids], []
        for index, layer in enumerate(self.layers[: max(tap_ids) + 1]):
            x, _, _ = self.causal_layer(x, layer, cos, sin)
            if index in tap_ids:
                collected.append(x)
        return torch.cat(collected, dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        """float32 logits [N, V] of residual-stream rows x [N, H] (the final norm is applied here)."""
        normed = self.norm(x, self.final_norm)
        if normed.is_cuda and normed.dtype == torch.bfloat16:
            return torch.mm(normed, self.head.t(), out_dtype=torch.float32)
        return F.linear(normed.float(), self.head.float())

    def new_cache(self, rows: int, length: int) -> Tensor:
        """Key and value cache [layers, 2, rows, kv_heads, length, d], zeroed so that masked entries are finite."""
        s = self.shape
        return torch.zeros(
            s.layers, 2, rows, s.kv_heads, length, s.head_dim, device=self.embed.device, dtype=self.embed.dtype
        )

    def prefill(self, ids: Tensor, lengths: Tensor, cache: Tensor) -> Tensor:
        """Run right-padded prompts ids [B, T], fill `cache`, return the residual stream at each last token [B, H]."""
        length = ids.shape[1]
        cos, sin = self.cos[None, :length, None], self.sin[None, :length, None]
        x = self.embed[ids]
        for index, layer in enumerate(self.layers):
            x, k, v = self.causal_layer(x, layer, cos, sin)
            cache[index, 0, :, :, :length], cache[index, 1, :, :, :length] = k, v
        return x[torch.arange(len(ids), device=ids.device), lengths - 1]

    def decode(self, token: Tensor, position: Tensor, cache: Tensor, window: int) -> Tensor:
        """One step: token [B] at position [B], attending to cache[..., :window, :]; returns the residual stream [B, H]."""
        s, rows = self.shape, torch.arange(len(token), device=token.device)
        cos, sin = self.cos[position][:, None, None], self.sin[position][:, None, None]
        allowed = (torch.arange(window, device=token.device) <= position[:, None])[:, None, None]
        x = self.embed[token]
        for index, layer in enumerate(self.layers):
            q, k, v = self.qkv(self.norm(x, layer["norm1"])[:, None], layer, cos, sin)
            cache[index, 0][rows, :, position], cache[index, 1][rows, :, position] = k[:, 0], v[:, 0]
            keys, values = cache[index, 0, :, :, :window], cache[index, 1, :, :, :window]
            # The query heads of one group become query rows, so that keys and values need not be repeated.
            grouped = q.reshape(len(token), s.kv_heads, -1, s.head_dim)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=allowed)
            x = x + F.linear(attended.reshape(len(token), -1), layer["o"])
            x = x + self.mlp(self.norm(x, layer["norm2"]), layer)
        return x
