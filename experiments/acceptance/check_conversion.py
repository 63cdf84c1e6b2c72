"""Check the imported target against transformers' own GGUF loader, an independent implementation of the format.

    python check_conversion.py --gguf FILE --checkpoint DIR [--prompts prompts.jsonl] [--tokens 48]

Three comparisons: every weight (ours must equal theirs rounded to BF16), the token ids of tricky strings, and the
greedy tokens of 20 prompts (float32 arithmetic on both sides; theirs from BF16-rounded weights, so that only the
conversion can differ). Exit code 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TRICKY = [
    "12345 and 3.14159, 1,000,000", "x=1;y=22;z=333", "  leading and   inner   spaces  ", "tab\tand\nnewline\r\n\r\n",
    "naïve café — “quotes” …", "日本語のテキスト 123", "🙂👩‍👩‍👧 emoji", "don't can't we'll I'm they've", "٣٤٥ ½ ² Ⅷ",
    "def f(a: int) -> int:\n    return a ** 2  # ok\n\n\n", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><file_sep><empty_output>", "", " ", "\n", "a\u00a0b\u2003c\u200bd", "\x00\x01\x7f", "https://a.b/c?d=e&f=1#g",
    "{\"k\": [1, 2.5e-10, null]}", "AAAAAAAAAAAAAAAAAAAA" * 4,
]  # fmt: skip

PROMPTS = [
    "What is the capital of France?", "Write a Python function that reverses a string.", "What is 17 + 25?",
    "Explain photosynthesis in two sentences.", "Name three planets.", "Translate 'good morning' to Spanish.",
    "Write a haiku about rain.", "If I have 3 apples and buy 4 more, how many do I have?", "What does HTTP stand for?",
    "Write a SQL query that selects all users older than 30.", "Give me a recipe for pancakes.", "Who wrote Hamlet?",
    "List the first five prime numbers.", "What is recursion?", "Summarise the water cycle.", "Write a for loop in C.",
    "A train goes 60 km in 1.5 hours. What is its speed?", "Tell me a joke.", "What is the boiling point of water?",
    "Write a Python class for a stack.",
]  # fmt: skip


def load_independent(gguf: Path) -> tuple[PreTrainedModel]:
    """The file through transformers' GGUF path, in float32, weights then rounded to BF16 values."""
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model.eval(), tokenizer


def compare_weights(ours: PreTrainedModel, theirs: PreTrainedModel) -> list[str]:
    """Names of weights that are missing on one side or differ in any bit."""
    left, right = dict(ours.named_parameters()), dict(theirs.named_parameters())
    names = sorted(set(left) ^ set(right))
    return names + [name for name in left if name in right and not torch.equal(left[name], right[name])]


def split_digits(text: str) -> list[str]:
    """`text` with every numeric character on its own: SmolLM's pre-tokeniser rule, which transformers' GGUF loader
    leaves out (it shows only where a number sign such as ½ would merge with a space before it)."""
    pieces = [""]
    for character in text:
        if unicodedata.category(character).startswith("N"):
            pieces += [character, ""]
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece]


def compare_tokenisation(ours: Any, theirs: Any) -> list[str]:
    """The tricky strings whose ids differ, or that our ids do not decode back to."""
    different = []
    for text in TRICKY + PROMPTS:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        expected = [
            token for piece in split_digits(text) for token in theirs(piece, add_special_tokens=False)["input_ids"]
        ]
        if ids != expected:
            different.append(f"ids differ: {text!r}: {ids} / {expected}")
        if ours.decode(ids, clean_up_tokenization_spaces=False) != text:
            different.append(f"no round trip: {text!r}")
    return different


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], tokens: int, eos: int) -> list[int]:
    """Up to `tokens` greedy token ids after `prompt`, `eos` included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def main() -> int:
    """Run the three comparisons and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    theirs, their_tokenizer = load_independent(args.gguf)
    eos = json.loads((args.checkpoint / "config.json").read_text())["eos_token_id"]
    weights, strings = compare_weights(ours, theirs), compare_tokenisation(tokenizer, their_tokenizer)
    same = 0
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        same += greedy(ours, ids, args.tokens, eos) == greedy(theirs, ids, args.tokens, eos)
    print(f"weights that differ: {len(weights)} {weights[:3]}")
    print(
        f"strings tokenised differently or not restored: {len(strings)} of {len(TRICKY) + len(PROMPTS)}",
        *strings,
        sep="\n  ",
    )
    print(f"prompts with the same greedy tokens: {same} of {len(PROMPTS)}")
    return int(bool(weights or strings or same < len(PROMPTS)))


if __name__ == "__main__":
    sys.exit(main())
