"""A DFlash drafter in plain torch, written from the format's description and sharing no code with engine or trainer.

One block at a time, no cache, float32: slow and easy to read. Reads the published checkpoint format.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class PlainDrafter:
    """Weights of a DFlash checkpoint folder and the draft step."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        own = self.config["dflash_config"]
        self.taps: list[int] = own["target_layer_ids"]
        self.mask_token: int = own["mask_token_id"]
        self.block: int = own.get("block_size", self.config.get("block_size", 16))
        if self.config.get("is_causal") or set(self.config["layer_types"]) != {"full_attention"}:
            raise ValueError(f"{folder}: this plain implementation knows non-causal full attention only")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, d] rotated at integer `positions` [T]: component i with component i + d/2."""
        half = x.shape[-1] // 2
        angle = positions.double()[:, None] * self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    @torch.no_grad()
    def draft(self, taps: Tensor, anchor: int, embedding: Tensor, head: Tensor) -> list[int]:
        """Block-size - 1 draft tokens after token `anchor`.

        taps [n, T * H]: tapped target states of all n tokens before the anchor (which sits at position n);
        embedding, head [V, H]: the target's.
        """
        n, w, c = len(taps), self.weights, self.config
        heads, kv_heads, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        context = self._norm(taps @ w["fc.weight"].T, "hidden_norm.weight")
        x = embedding[torch.tensor([anchor] + [self.mask_token] * (self.block - 1))].float()
        places = torch.arange(n + self.block)
        for layer in range(c["num_hidden_layers"]):
            p = f"layers.{layer}."
            y = self._norm(x, p + "input_layernorm.weight")
            both = torch.cat([context, y])
            q = self._norm((y @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, d), p + "self_attn.q_norm.weight")
            k = self._norm(
                (both @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv_heads, d), p + "self_attn.k_norm.weight"
            )
            v = (both @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv_heads, d)
            q, k = self._rope(q, places[n:]), self._rope(k, places)
            outputs = []
            for one in range(heads):
                group = one * kv_heads // heads
                outputs.append(torch.softmax(q[:, one] @ k[:, group].T / d**0.5, -1) @ v[:, group])
            x = x + torch.cat(outputs, -1) @ w[p + "self_attn.o_proj.weight"].T
            y = self._norm(x, p + "post_attention_layernorm.weight")
            gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        states = self._norm(x, "norm.weight")[1:]
        return [int(token) for token in (states @ head.float().T).argmax(-1)]
