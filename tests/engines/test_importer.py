"""The GGUF importer: rounding, layout and refusals, against files that the gguf package itself writes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from specpilot.engines.importers.bf16_safetensors import round_to_bf16, write_bf16_safetensors
from specpilot.engines.importers.errors import ImportRefused
from specpilot.engines.importers.gguf_llama import import_gguf, main, sha256_of, undo_rope_permutation

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
BYTES = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "12", "Ġ1"]
SPECIAL = 3


def rope_permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k, row by row: halves of a head become interleaved pairs."""
    half = weight.shape[0] // heads // 2
    rows = []
    for head in range(heads):
        for index in range(half):
            rows += [weight[head * 2 * half + index], weight[head * 2 * half + half + index]]
    return np.stack(rows)


def weights() -> dict[str, NDArray[np.float32]]:
    """A tiny Llama under Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        shapes |= {p + "input_layernorm": (HIDDEN,), p + "post_attention_layernorm": (HIDDEN,)}
        shapes |= {
            p + "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        }
        shapes |= {p + f"self_attn.{name}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for name in "kv"}
        shapes |= {p + f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[p + "mlp.down_proj"] = (HIDDEN, INNER)
    return {name + ".weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(
    path: Path, architecture: str = "llama", pre: str = "smollm", drop: str = "", eos: bool = True, **extra: Any
) -> dict[str, NDArray[np.float32]]:
    """Write the tiny model as GGUF (Q8_0 where rows allow it for v_proj, else float32); returns the true weights."""
    truth = weights()
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([SPECIAL if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(["h e", "1 2", "Ġ 1"])
    writer.add_bos_token_id(1)
    if eos:
        writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, values in truth.items():
        if name == drop:
            continue
        heads = HEADS if "q_proj" in name else KV_HEADS
        stored = rope_permute(values, heads) if "q_proj" in name or "k_proj" in name else values
        if "v_proj" in name:
            packed = quantize(stored, GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127, min_value=-(2.0**127)),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=200, deadline=None)
def test_rounding_equals_torch(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bf16(array), expected)


def test_rounding_ties_go_to_even_and_nan_is_refused() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001], dtype=np.uint32).view(np.float32)
    assert round_to_bf16(ties).tolist() == [0x3F80, 0x3F82, 0x3F81]
    with pytest.raises(ValueError, match="NaN"):
        round_to_bf16(np.array([np.nan], dtype=np.float32))


def test_written_file_is_read_by_safetensors_and_aligned(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1.5], dtype=np.float32)}
    path = tmp_path / "x.safetensors"
    write_bf16_safetensors(path, tensors)
    assert (8 + struct.unpack("<Q", path.read_bytes()[:8])[0]) % 8 == 0
    with safe_open(path, "pt") as reader:
        assert sorted(reader.keys()) == ["a", "b"]
        assert reader.get_tensor("b").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert reader.get_tensor("b").dtype is torch.bfloat16


def test_undoing_the_permutation_restores_rows() -> None:
    weight = np.arange(48 * 3, dtype=np.float32).reshape(48, 3)
    assert np.array_equal(undo_rope_permutation(rope_permute(weight, 3), 3), weight)
    with pytest.raises(ImportRefused, match="do not split"):
        undo_rope_permutation(weight, 5)


def test_import_restores_weights_config_and_tokenizer(tmp_path: Path) -> None:
    truth = write_gguf(tmp_path / "m.gguf")
    digests = import_gguf(tmp_path / "m.gguf", tmp_path / "out", sha256_of(tmp_path / "m.gguf"))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as reader:
        assert set(reader.keys()) == set(truth)
        for name, values in truth.items():
            found = reader.get_tensor(name)
            if "v_proj" in name:  # went through Q8_0: one step is max/127
                assert (found.float() - torch.from_numpy(values)).abs().max() < np.abs(values).max() / 127
            else:
                assert torch.equal(found, torch.from_numpy(values).to(torch.bfloat16)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "vocab_size": len(TOKENS), "eos_token_id": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert digests["model.safetensors"] == sha256_of(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_digits_are_split_before_merges(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    encoded = tokenizer.encode("he 12<|im_end|>")
    assert encoded.tokens == ["he", "Ġ", "1", "2", "<|im_end|>"]
    text = "naïve ½ 日本\t12\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bytes_are_deterministic(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert import_gguf(tmp_path / "m.gguf", tmp_path / "a") == import_gguf(tmp_path / "m.gguf", tmp_path / "b")


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    good, out = tmp_path / "m.gguf", tmp_path / "out"
    write_gguf(good)
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:-3000])
    write_gguf(tmp_path / "falcon.gguf", architecture="falcon")
    write_gguf(tmp_path / "pre.gguf", pre="other-pre")
    write_gguf(tmp_path / "hole.gguf", drop="model.layers.1.mlp.up_proj.weight")
    write_gguf(tmp_path / "scaled.gguf", llama__rope__scaling__type="yarn")
    write_gguf(tmp_path / "endless.gguf", eos=False)
    cases = {
        "missing": "no such file", "text": "not a GGUF file", "cut": "damaged or truncated", "falcon": "'falcon' is not supported",
        "pre": "pre-tokeniser 'other-pre'", "hole": "model.layers.1.mlp.up_proj.weight", "scaled": "rope scaling 'yarn'",
        "endless": "'tokenizer.ggml.eos_token_id' is missing",
    }  # fmt: skip
    for name, message in cases.items():
        with pytest.raises(ImportRefused, match=message):
            import_gguf(tmp_path / f"{name}.gguf", out)
        assert not out.exists()
    with pytest.raises(ImportRefused, match="SHA-256"):
        import_gguf(good, out, "0" * 64)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_existing_output_is_kept_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "m.gguf")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("x")
    arguments = ["--gguf", str(tmp_path / "m.gguf"), "--out", str(out)]
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert (out / "mine.txt").exists()
    assert main([*arguments, "--overwrite"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
