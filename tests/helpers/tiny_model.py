"""Tiny random checkpoints, in the same files and formats as real ones: a target with tokenizer and chat template, and a DFlash drafter.

Needs torch and safetensors, so only tests of the data plane import it at module level.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
EOS_ID, MASK_ID = 2, 3
VOCAB = 260  # the specials and one token per byte
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_tiny_model(
    folder: str | Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 48,
    vocab: int = VOCAB,
    tied: bool = True,
    max_position: int = 512,
    scale: float = 0.35,
) -> Path:
    """Writes a random BF16 target (config.json, model.safetensors, tokenizer.json, tokenizer_config.json) and returns its folder.

    architecture: llama or qwen3. scale: standard deviation of the matrices; large enough that greedy output is not one repeated token.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID})
    random = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": _matrix(random, vocab, hidden, 1.0)}
    for i in range(layers):
        tensors |= _layer(random, f"model.layers.{i}.", config, architecture == "qwen3", scale)
    tensors["model.norm.weight"] = _norm(random, hidden)
    if not tied:
        tensors["lm_head.weight"] = _matrix(random, vocab, hidden, 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def make_tiny_drafter(
    folder: str | Path,
    target_dir: str | Path,
    *,
    seed: int = 1,
    layers: int = 2,
    block_size: int = 8,
    target_layer_ids: list[int] | None = None,
    scale: float = 0.35,
    **overrides: Any,
) -> Path:
    """Writes a random BF16 DFlash drafter for the target in `target_dir`, in the published format; `overrides` replace config keys."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = json.loads((Path(target_dir) / "config.json").read_text())
    depth = target["num_hidden_layers"]
    taps = target_layer_ids if target_layer_ids is not None else [0, depth // 2, depth - 2]
    config = {
        **target,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "block_size": block_size,
        "num_target_layers": depth,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": taps},
        **overrides,
    }
    _write_json(folder / "config.json", config)
    random = torch.Generator().manual_seed(seed)
    h = config["hidden_size"]
    tensors = {
        "fc.weight": _matrix(random, h, len(taps) * h, scale),
        "hidden_norm.weight": _norm(random, h),
        "norm.weight": _norm(random, h),
    }
    for i in range(layers):
        tensors |= _layer(random, f"layers.{i}.", config, True, scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(
    random: torch.Generator, prefix: str, config: dict[str, Any], qk_norm: bool, scale: float
) -> dict[str, torch.Tensor]:
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    tensors = {
        "input_layernorm.weight": _norm(random, h),
        "post_attention_layernorm.weight": _norm(random, h),
        "self_attn.q_proj.weight": _matrix(random, q, h, scale),
        "self_attn.k_proj.weight": _matrix(random, kv, h, scale),
        "self_attn.v_proj.weight": _matrix(random, kv, h, scale),
        "self_attn.o_proj.weight": _matrix(random, h, q, scale),
        "mlp.gate_proj.weight": _matrix(random, i, h, scale),
        "mlp.up_proj.weight": _matrix(random, i, h, scale),
        "mlp.down_proj.weight": _matrix(random, h, i, scale),
    }
    if qk_norm:
        tensors |= {"self_attn.q_norm.weight": _norm(random, d), "self_attn.k_norm.weight": _norm(random, d)}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _matrix(random: torch.Generator, rows: int, columns: int, scale: float) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=random) * scale).bfloat16()


def _norm(random: torch.Generator, size: int) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(size, generator=random)).bfloat16()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: every byte is a token, so any text has ids and any ids have text."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE},
    )
