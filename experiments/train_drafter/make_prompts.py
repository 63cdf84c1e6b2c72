"""Write the seeds from which generate.py makes user prompts; deterministic, no data set needed.

    python make_prompts.py --out seeds.jsonl [--scale 1.0]

A seed is `closed` (a whole chat prompt) or `open` (the start of a user turn, which the target itself continues). Kinds:
code (functions to complete: invented signatures, composed tasks with executed examples, the standard library's own
signatures and docstrings), arithmetic (word problems: openings to continue, and composed ones) and general (empty user
turn: the target asks itself a question). HumanEval and GSM8K are never read here.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import code_tasks
import word_problems

KINDS = ["code", "arithmetic", "general"]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# The first of each list is the deployment's own wording (experiments/acceptance/build_prompts.py).
CODE_REQUESTS = [
    "Complete the following Python function. Answer with the complete function in one Python code block.\n\n```python\n{task}\n```",
    "Complete this function:\n\n```python\n{task}\n```",
    "Please write the body of this Python function.\n\n```python\n{task}\n```",
    "```python\n{task}\n```\n\nFinish the function above.",
]
ARITHMETIC_REQUESTS = [
    "{task}\n\nReason step by step, and put the final answer within \\boxed{{}}.",
    "{task}",
    "{task} Let's think step by step.",
    "Solve this problem and explain each step.\n\n{task}",
]
USUAL_WORDING = 0.85  # share of prompts in the deployment's wording


def render(user: str) -> str:
    """The chat prompt up to the end of an unfinished user turn `user`."""
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}"


def close(user: str) -> str:
    """The whole chat prompt with `user` as the user's message."""
    return render(user) + "<|im_end|>\n<|im_start|>assistant\n"


def wording(requests: list[str], rng: random.Random) -> str:
    """One request form, mostly the usual one."""
    return requests[0] if rng.random() < USUAL_WORDING else rng.choice(requests[1:])


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """Word `size`-grams of the user's message, lower case, without the request that all prompts share."""
    message = text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
    for request in CODE_REQUESTS + ARITHMETIC_REQUESTS:
        for part in request.format(task="\0").split("\0"):
            if len(part.split()) > 2:
                message = message.replace(part, " ")
    words = re.findall(r"[a-z]+|\d+", message.lower())
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def finish_prompt(seed: dict[str, str], continuation: str, ended: bool) -> str | None:
    """The chat prompt made from an open seed and what the target wrote after it; None when it is unusable."""
    text = seed["text"] + continuation
    if seed["kind"] == "general":
        text = text.strip()
        return close(text) if ended and 12 <= len(text) <= 900 and "<|im_" not in text else None
    if seed["kind"] == "code":
        task = text.split("```python\n", 1)[-1]
        quote = seed["quote"]
        head, opening, body = task.partition(quote)
        docstring, closing, _ = body.partition(quote)
        if not closing or not 15 <= len(docstring.strip()) <= 700 or "```" in docstring or "<|" in docstring:
            return None
        return close(seed["request"].format(task=head + opening + docstring + closing))
    question, mark, _ = text.partition("?")
    if (
        not mark
        or not 40 <= len(question) <= 700
        or not re.search(r"\d", question)
        or "<|" in question
        or "\n\n" in question
    ):
        return None
    return close(seed["request"].format(task=question + mark))


def seeds(scale: float, rng: random.Random) -> Iterator[dict[str, str]]:
    """All seeds; `scale` 1.0 gives about 135 thousand."""

    def count(number: int) -> range:
        return range(int(number * scale))

    for _ in count(42_000):
        head, quote = code_tasks.open_function(rng)
        request = wording(CODE_REQUESTS, rng)
        # The target continues the deployment's wording whatever request the finished prompt gets.
        text = CODE_REQUESTS[0].split("{task}")[0] + head
        yield {"kind": "code", "state": "open", "text": text, "quote": quote, "request": request}
    for _ in count(20_000):
        yield {
            "kind": "code",
            "state": "closed",
            "text": close(wording(CODE_REQUESTS, rng).format(task=code_tasks.composed(rng))),
        }
    library = code_tasks.standard_library()
    for task in rng.sample(library, min(len(library), int(5_000 * scale))):
        yield {"kind": "code", "state": "closed", "text": close(wording(CODE_REQUESTS, rng).format(task=task))}
    for _ in count(36_000):
        request = wording(ARITHMETIC_REQUESTS, rng)
        yield {"kind": "arithmetic", "state": "open", "text": word_problems.opening(rng), "request": request}
    for _ in count(18_000):
        yield {
            "kind": "arithmetic",
            "state": "closed",
            "text": close(wording(ARITHMETIC_REQUESTS, rng).format(task=word_problems.composed(rng))),
        }
    for _ in count(14_000):
        yield {"kind": "general", "state": "open", "text": ""}


def main() -> None:
    """Write the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    lines = [json.dumps(seed) for seed in seeds(args.scale, random.Random(7))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")
    print(f"{args.out}: {len(lines)} seeds")


if __name__ == "__main__":
    main()
