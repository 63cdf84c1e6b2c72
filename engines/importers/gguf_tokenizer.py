"""Build `tokenizer.json` and `tokenizer_config.json` from the metadata of a GGUF file.

Only pre-tokenisers whose splitting rule is known exactly are accepted: a near miss would change token ids without
any visible error. May not import torch, transformers or the control plane.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

if __package__:
    from .errors import ImportRefused
else:
    from errors import ImportRefused  # type: ignore[import-not-found,no-redef]

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole, before the pre-tokeniser


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":  # SmolLM splits every digit off before GPT-2's regular expression
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    raise ImportRefused(f"pre-tokeniser {name!r} is not supported; known: smollm, gpt-2")


def _merge_pairs(merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for index, merge in enumerate(merges):
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise ImportRefused(f"merge {index} is {merge!r}, not two parts: the tokenizer metadata is damaged")
        pairs.append((left, right))
    return pairs


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer with the file's vocabulary, merges and special tokens.

    Raises ImportRefused for another tokenizer model, an unknown pre-tokeniser, or damaged lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ImportRefused(f"tokenizer model {model!r} is not supported; this importer knows byte-level BPE ('gpt2')")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise ImportRefused("tokenizer metadata is damaged: repeated tokens, or types and tokens of unequal length")
    try:
        bpe = BPE(vocab=vocabulary, merges=_merge_pairs(metadata.get("tokenizer.ggml.merges", [])))
    except Exception as error:  # the library raises a bare Exception when a merge names an unknown token
        raise ImportRefused(f"tokenizer merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def write_tokenizer(metadata: dict[str, Any], max_length: int, folder: Path) -> None:
    """Write both tokenizer files into `folder`. `max_length` is the model's context length in tokens."""
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[int(token_id)]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
