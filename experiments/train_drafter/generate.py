"""Generate the drafter's training text with the target itself.

    python generate.py --target DIR --seeds seeds.jsonl --prompts-avoid FILE... --out data.npz --device cuda

Two passes over one batched generator: the target completes the seeds into user prompts (sampled), then answers every
prompt (mostly greedy, as the deployment decodes). Prompts that share an n-gram with a file under --prompts-avoid are
dropped. Writes `tokens` [N, L] uint16, `prompt_length` [N], `length` [N], `kind` [N].
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from make_prompts import KINDS, finish_prompt, ngrams, render
from target import Target
from tokenizers import Tokenizer
from torch import Tensor

END = 2  # <|im_end|>


class Job:
    """One sequence to generate: prompt ids, sampling temperature (0: greedy), stop set index, and its output."""

    def __init__(self, ids: list[int], temperature: float, stop: int, limit: int) -> None:
        self.ids, self.temperature, self.stop, self.limit = ids, temperature, stop, limit
        self.output: list[int] = []


@torch.no_grad()
def pick(logits: Tensor, temperature: Tensor, min_p: float) -> Tensor:
    """Next token per row: argmax where temperature is 0, else a sample from the min-p-truncated tempered distribution."""
    greedy = logits.argmax(-1)
    if not bool((temperature > 0).any()):
        return greedy
    scaled = logits / temperature.clamp_min(1e-3)[:, None]
    floor = scaled.max(-1, keepdim=True).values + float(np.log(min_p))
    noise = -torch.empty_like(scaled).exponential_().log()
    sampled = torch.where(scaled < floor, float("-inf"), scaled + noise).argmax(-1)
    return torch.where(temperature > 0, sampled, greedy)


@torch.no_grad()
def run_batch(target: Target, jobs: list[Job], stops: Tensor, capacity: int, min_p: float) -> None:
    """Generate all `jobs` together; finished rows leave at every check. stops [S, V]: which tokens end a sequence."""
    device = target.embed.device
    lengths = torch.tensor([len(job.ids) for job in jobs], device=device)
    cache = target.new_cache(len(jobs), capacity)
    hidden = torch.empty(len(jobs), target.shape.hidden, device=device, dtype=target.embed.dtype)
    for start in range(0, len(jobs), 512):  # prefill in slices to bound the activations
        part = jobs[start : start + 512]
        width = max(len(job.ids) for job in part)
        ids = torch.tensor([job.ids + [END] * (width - len(job.ids)) for job in part], device=device)
        hidden[start : start + 512] = target.prefill(
            ids, lengths[start : start + 512], cache[:, :, start : start + 512]
        )
    temperature = torch.tensor([job.temperature for job in jobs], device=device)
    stop = torch.tensor([job.stop for job in jobs], device=device)
    limit = torch.tensor([min(job.limit, capacity - len(job.ids)) for job in jobs], device=device)
    rows = torch.arange(len(jobs), device=device)
    output = torch.full((len(jobs), int(limit.max())), -1, device=device, dtype=torch.int32)
    position, alive = lengths.clone(), torch.ones(len(jobs), device=device, dtype=torch.bool)
    longest = int(lengths.max())
    for step in range(output.shape[1]):
        token = pick(target.logits(hidden), temperature, min_p)
        output[rows, step] = torch.where(alive, token, -1).int()
        alive = alive & ~stops[stop, token] & (step + 1 < limit)
        if step % 16 == 15:
            count = int(alive.sum())
            if count == 0:
                break
            if count < 0.8 * len(rows):
                keep = alive.nonzero()[:, 0]
                rows, token, position, temperature, stop, limit, alive = (
                    value[keep] for value in (rows, token, position, temperature, stop, limit, alive)
                )
                for layer in cache:  # in place: a second cache would not fit
                    layer[:, :count] = layer[:, keep]
                cache = cache[:, :, :count]
                longest = int(position.max()) - step
        window = min(capacity, -(-(longest + step + 1) // 64) * 64)
        hidden = target.decode(token, position.clamp_max(capacity - 1), cache, window)
        position = position + 1
    for job, line in zip(jobs, output.cpu().numpy(), strict=True):
        job.output = line[line >= 0].tolist()


def run_all(
    target: Target, jobs: list[Job], stops: Tensor, capacity: int, batch: int, min_p: float, deadline: float
) -> list[Job]:
    """Run jobs in batches of similar prompt length until done or `deadline` (time.time()); returns the finished ones."""
    ordered = sorted(jobs, key=lambda job: len(job.ids))
    batches = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    random.Random(0).shuffle(batches)
    done: list[Job] = []
    for number, part in enumerate(batches):
        if time.time() > deadline:
            print(f"deadline: {number} of {len(batches)} batches done", flush=True)
            break
        began = time.time()
        run_batch(target, part, stops, capacity, min_p)
        done += part
        produced = sum(len(job.output) for job in part)
        if number % 4 == 0:
            print(
                f"batch {number}/{len(batches)}: {produced} tokens, {produced / (time.time() - began):.0f} tokens/s",
                flush=True,
            )
    return done


def stop_table(tokenizer: Tokenizer, vocabulary: int, device: torch.device) -> Tensor:
    """Stop sets [4, V]: 0 end of turn; 1 also a closing docstring quote; 2 also a question mark; 3 nothing."""
    table = torch.zeros(4, vocabulary, dtype=torch.bool)
    table[:3, END] = True
    for token in range(vocabulary):
        text = tokenizer.decode([token], skip_special_tokens=False)
        table[1, token] |= '"""' in text or "'''" in text
        table[2, token] |= "?" in text
    return table.to(device)


def cut_loops(
    sequences: np.ndarray, prompt: np.ndarray, length: np.ndarray, keep: int, longest_period: int = 64
) -> np.ndarray:
    """New lengths: a tail that repeats with period p for more than keep * p + 64 tokens is cut to that."""
    columns = np.arange(sequences.shape[1])
    inside = (columns >= prompt[:, None]) & (columns < length[:, None])
    result = length.copy()
    for period in range(1, longest_period + 1):
        same = np.zeros_like(inside)
        same[:, period:] = (sequences[:, period:] == sequences[:, :-period]) & inside[:, period:] & inside[:, :-period]
        different = inside & ~same
        last = np.where(different.any(1), sequences.shape[1] - 1 - different[:, ::-1].argmax(1), prompt)
        tail = length - 1 - last
        result = np.where(tail > keep * period + 64, np.minimum(result, last + 1 + keep * period + 64), result)
    return result


def make_user_prompts(
    target: Target, tokenizer: Tokenizer, seeds: list[dict[str, str]], stops: Tensor, args: argparse.Namespace
) -> list[tuple[str, str]]:
    """(kind, chat prompt) of all seeds: open ones are completed by the target, closed ones taken as they are."""
    finished = [(seed["kind"], seed["text"]) for seed in seeds if seed["state"] == "closed"]
    waiting = [seed for seed in seeds if seed["state"] == "open"]
    stop_of = {"code": 1, "arithmetic": 2, "general": 0}
    prefixes = tokenizer.encode_batch([render(seed["text"]) for seed in waiting], add_special_tokens=False)
    jobs = [Job(code.ids, 0.9, stop_of[seed["kind"]], 150) for code, seed in zip(prefixes, waiting, strict=True)]
    by_job = {id(job): seed for job, seed in zip(jobs, waiting, strict=True)}
    done = run_all(target, jobs, stops, args.capacity, args.batch, 0.04, time.time() + args.prompt_seconds)
    texts = tokenizer.decode_batch(
        [[token for token in job.output if token != END] for job in done], skip_special_tokens=False
    )
    for job, text in zip(done, texts, strict=True):
        seed = by_job[id(job)]
        prompt = finish_prompt(seed, text, ended=bool(job.output) and job.output[-1] == END)
        if prompt is not None:
            finished.append((seed["kind"], prompt))
    return finished


def without_overlap(prompts: list[tuple[str, str]], avoid: list[str], size: int = 8) -> list[tuple[str, str]]:
    """Drop repeats and every prompt that shares a `size`-word sequence with a text in `avoid`."""
    forbidden = set().union(*(ngrams(text, size) for text in avoid)) if avoid else set()
    unique = dict.fromkeys(prompts)
    kept = [prompt for prompt in unique if not (ngrams(prompt[1], size) & forbidden)]
    print(
        f"prompts: {len(prompts)}, without repeats {len(unique)}, without {size}-gram overlap {len(kept)}", flush=True
    )
    return kept


def pack(jobs: list[Job], kinds: list[int], width: int) -> dict[str, np.ndarray]:
    """Arrays of the training file; sequences shorter than 24 answer tokens are dropped, loops are cut."""
    tokens = np.full((len(jobs), width), END, dtype=np.uint16)
    prompt = np.array([len(job.ids) for job in jobs])
    length = np.array([min(width, len(job.ids) + len(job.output)) for job in jobs])
    for row, job in enumerate(jobs):
        tokens[row, : length[row]] = (job.ids + job.output)[:width]
    short = cut_loops(tokens, prompt, length, keep=2)
    print(
        f"loops: {int((short < length).sum())} of {len(jobs)} sequences cut, {int((length - short).sum())} tokens",
        flush=True,
    )
    good = short - prompt >= 24
    arrays: dict[str, np.ndarray] = {
        "tokens": tokens,
        "prompt_length": prompt.astype(np.int32),
        "length": short.astype(np.int32),
        "kind": np.array(kinds, np.int8),
    }
    return {name: array[good] for name, array in arrays.items()}


def main() -> None:
    """Both passes, then the file and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--seeds", type=Path, required=True)
    parser.add_argument("--prompts-avoid", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--capacity", type=int, default=640, help="longest sequence in tokens")
    parser.add_argument("--answer-tokens", type=int, default=320)
    parser.add_argument("--prompt-seconds", type=float, default=60)
    parser.add_argument("--answer-seconds", type=float, default=150)
    parser.add_argument("--limit", type=int, default=0, help="use only so many seeds")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    target = Target(args.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    seeds = [json.loads(line) for line in args.seeds.read_text().splitlines()]
    random.Random(1).shuffle(seeds)
    seeds = seeds[: args.limit or None]
    stops = stop_table(tokenizer, len(target.embed), device)
    avoid = [json.loads(line)["text"] for path in args.prompts_avoid for line in path.read_text().splitlines()]
    began = time.time()
    prompts = without_overlap(make_user_prompts(target, tokenizer, seeds, stops, args), avoid)
    print(f"prompts after {time.time() - began:.0f} s: {Counter(kind for kind, _ in prompts)}", flush=True)
    codes = tokenizer.encode_batch([text for _, text in prompts], add_special_tokens=False)
    rng, jobs, kind_of = random.Random(2), [], {}
    for (kind, _), code in zip(prompts, codes, strict=True):
        if len(code.ids) > args.capacity // 2:
            continue
        # Most answers are greedy; some sampled; some run on past the end of turn, as with ignore_eos.
        job = Job(
            code.ids, rng.choices([0.0, 0.7], [0.88, 0.12])[0], rng.choices([0, 3], [0.94, 0.06])[0], args.answer_tokens
        )
        jobs.append(job)
        kind_of[id(job)] = KINDS.index(kind)
    rng.shuffle(jobs)
    done = run_all(target, jobs, stops, args.capacity, args.batch, 0.02, time.time() + args.answer_seconds)
    arrays = pack(done, [kind_of[id(job)] for job in done], args.capacity)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, **arrays)  # type: ignore[arg-type]
    answer = int((arrays["length"] - arrays["prompt_length"]).sum())
    kinds = {
        KINDS[kind]: int(count) for kind, count in zip(*np.unique(arrays["kind"], return_counts=True), strict=True)
    }
    print(
        json.dumps(
            {
                "sequences": len(arrays["length"]),
                "tokens": int(arrays["length"].sum()),
                "answer_tokens": answer,
                "kinds": kinds,
                "seconds": round(time.time() - began),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
