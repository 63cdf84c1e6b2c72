"""Import a Llama-architecture GGUF file as a Hugging Face checkpoint folder in BF16.

    python gguf_llama.py --gguf FILE --out DIR [--sha256 HEX] [--overwrite]

Weights are dequantised to float32 by the gguf package, llama.cpp's reordering of the q and k rows is undone, and
every value is rounded to the nearest BF16. Config, tokenizer and chat template come from the file's own metadata.
The output's bytes depend on the input alone. Uses gguf, numpy and tokenizers; may not import torch, the control
plane or the network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

if __package__:
    from .bf16_safetensors import write_bf16_safetensors
    from .errors import ImportRefused
    from .gguf_tokenizer import write_tokenizer
else:  # run as a script: this folder is sys.path[0]
    from bf16_safetensors import write_bf16_safetensors  # type: ignore[import-not-found,no-redef]
    from errors import ImportRefused  # type: ignore[import-not-found,no-redef]
    from gguf_tokenizer import write_tokenizer  # type: ignore[import-not-found,no-redef]

Metadata = dict[str, Any]
Float32Array = NDArray[np.float32]

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def open_gguf(path: Path) -> GGUFReader:
    """Open and parse `path`. Raises ImportRefused when it is missing, no GGUF file, or damaged."""
    if not path.is_file():
        raise ImportRefused(f"{path}: no such file; check --gguf")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ImportRefused(f"{path}: not a GGUF file (it does not start with 'GGUF')")
    try:
        return GGUFReader(str(path))
    except Exception as error:  # the reader raises many types on damaged input
        raise ImportRefused(f"{path}: damaged or truncated GGUF file ({error}); fetch it again") from error


def read_metadata(reader: GGUFReader, path: Path) -> Metadata:
    """All key-value fields as Python values. Raises ImportRefused when one cannot be decoded."""
    metadata: Metadata = {}
    for key, field in reader.fields.items():
        try:
            metadata[key] = field.contents()
        except Exception as error:
            raise ImportRefused(f"{path}: metadata field {key!r} is damaged ({error}); fetch the file again") from error
    return metadata


def _require(metadata: Metadata, key: str) -> Any:
    if key not in metadata:
        raise ImportRefused(f"metadata field {key!r} is missing: not a complete Llama GGUF file")
    return metadata[key]


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def check_supported(metadata: Metadata) -> None:
    """Raise ImportRefused unless this is a plain dense Llama whose numbers this importer reproduces exactly."""
    architecture = _require(metadata, "general.architecture")
    if architecture != "llama":
        raise ImportRefused(f"architecture {architecture!r} is not supported; this importer knows 'llama' only")
    if metadata.get("llama.expert_count", 0):
        raise ImportRefused("mixture-of-experts Llama is not supported; this importer knows dense models only")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ImportRefused(f"rope scaling {scaling!r} is not supported; only plain rope is")


def build_config(metadata: Metadata, has_own_head: bool) -> dict[str, Any]:
    """The Hugging Face `config.json` of a LlamaForCausalLM from GGUF metadata."""
    hidden = int(_require(metadata, "llama.embedding_length"))
    heads = int(_require(metadata, "llama.attention.head_count"))
    rope_dim: Any = metadata.get("llama.rope.dimension_count", hidden // heads)
    key_length: Any = metadata.get("llama.attention.key_length", rope_dim)
    head_dim = int(key_length)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ImportRefused("rope over a part of head_dim is not supported")
    eos_token = int(_require(metadata, "tokenizer.ggml.eos_token_id"))
    pad_token: Any = metadata.get("tokenizer.ggml.padding_token_id", eos_token)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(_require(metadata, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos_token,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(_require(metadata, "llama.feed_forward_length")),
        "max_position_embeddings": int(_require(metadata, "llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(_require(metadata, "llama.block_count")),
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": int(pad_token),
        "rms_norm_eps": _shortest(_require(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": not has_own_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(_require(metadata, "tokenizer.ggml.tokens")),
    }


def undo_rope_permutation(weight: Float32Array, heads: int) -> Float32Array:
    """Rows of a q or k projection from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face rows (i, i + head_dim/2); its converter
    therefore interleaves the two halves of each head. weight [heads * head_dim, hidden] -> same shape.
    """
    rows, columns = weight.shape
    if rows % (2 * heads):
        raise ImportRefused(f"a q/k projection has {rows} rows, which do not split into {heads} heads of even width")
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ImportRefused on an unknown name."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{_BLOCK_NAMES[parts[2]]}.weight"
    raise ImportRefused(f"tensor {gguf_name!r} is not part of a plain dense Llama; the file needs another importer")


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    return shapes


class DequantisedTensors(Mapping[str, Float32Array]):
    """The file's tensors under Hugging Face names, dequantised on access (one in memory at a time)."""

    def __init__(self, tensors: list[ReaderTensor], config: dict[str, Any]) -> None:
        self._config = config
        self._tensors = {hugging_face_name(tensor.name): tensor for tensor in tensors}
        self.shapes = expected = _expected_shapes(config)
        missing = sorted(set(expected) - set(self._tensors))
        extra = sorted(set(self._tensors) - set(expected))
        if missing or extra:
            raise ImportRefused(f"tensors do not match the metadata: missing {missing[:5]}, unexpected {extra[:5]}")
        for name, shape in expected.items():
            found = tuple(int(size) for size in reversed(self._tensors[name].shape))
            if found != shape:
                raise ImportRefused(f"tensor {name} has shape {found}, the metadata says {shape}")

    def __getitem__(self, name: str) -> Float32Array:
        tensor = self._tensors[name]
        try:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ImportRefused(
                f"tensor {name}: quantisation {tensor.tensor_type!r} cannot be read ({error})"
            ) from error
        values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        if name.endswith("q_proj.weight"):
            return undo_rope_permutation(values, self._config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return undo_rope_permutation(values, self._config["num_key_value_heads"])
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def sha256_of(path: Path) -> str:
    """Lower-case hex SHA-256 of the file at `path`."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_checkpoint(gguf: Path, folder: Path) -> None:
    reader = open_gguf(gguf)
    metadata = read_metadata(reader, gguf)
    check_supported(metadata)
    config = build_config(metadata, has_own_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    tensors = DequantisedTensors(list(reader.tensors), config)
    _write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", token_ids)
    write_tokenizer(metadata, config["max_position_embeddings"], folder)
    try:
        write_bf16_safetensors(folder / "model.safetensors", tensors, tensors.shapes)
    except ValueError as error:
        raise ImportRefused(f"{gguf}: {error}") from error


def import_gguf(gguf: Path, out: Path, sha256: str | None = None, overwrite: bool = False) -> dict[str, str]:
    """Convert `gguf` into the checkpoint folder `out`; returns file name -> SHA-256 of what was written.

    The folder appears whole or not at all: it is written beside `out` and renamed. Raises ImportRefused on a wrong
    digest, a damaged file, another architecture, or when `out` exists and `overwrite` is false.
    """
    if sha256 is not None and gguf.is_file() and (found := sha256_of(gguf)) != sha256.lower():
        raise ImportRefused(f"{gguf}: SHA-256 is {found}, expected {sha256.lower()}; fetch the file again")
    if out.exists() and not overwrite:
        raise ImportRefused(f"{out}: exists already; remove it or pass --overwrite")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_checkpoint(gguf, staging)
        digests = {path.name: sha256_of(path) for path in sorted(staging.iterdir())}
        staging.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return digests


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the digest of every file written. Exit code 2 on a refused file."""
    parser = argparse.ArgumentParser(description="Import a Llama GGUF file as a BF16 Hugging Face checkpoint folder.")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sha256", help="expected SHA-256 of the GGUF file")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output folder")
    args = parser.parse_args(argv)
    try:
        digests = import_gguf(args.gguf, args.out, args.sha256, args.overwrite)
    except (ImportRefused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, digest in digests.items():
        print(f"{digest}  {args.out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
