"""Accepted length of a drafter on held-out prompts, exactly as greedy decoding would give it.

Greedy verification commits the target's own greedy text, so the draft at an anchor depends on that text alone: one pass
scores the block at every position, and walking over the scores gives the rounds a decoder would have made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from drafter import Drafter
from generate import END, Job, run_batch
from target import Target
from tokenizers import Tokenizer
from torch import Tensor


@dataclass
class Prompt:
    """A held-out prompt with the target's greedy answer; ids [T] holds both."""

    group: str
    ids: list[int]
    prompt_length: int


def held_out(target: Target, tokenizer: Tokenizer, files: list[Path], tokens: int) -> list[Prompt]:
    """Greedy answers of at most `tokens` tokens (end of turn included) to all prompts in `files`."""
    stops = torch.zeros(1, len(target.embed), dtype=torch.bool, device=target.embed.device)
    stops[0, END] = True
    groups, jobs = [], []
    for path in files:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            groups.append(f"{path.stem}/{record['source']}")
            jobs.append(Job(tokenizer.encode(record["text"], add_special_tokens=False).ids, 0.0, 0, tokens))
    run_batch(target, jobs, stops, max(len(job.ids) for job in jobs) + tokens, 0.02)
    return [Prompt(group, job.ids + job.output, len(job.ids)) for group, job in zip(groups, jobs, strict=True)]


@torch.no_grad()
def accepted_per_anchor(drafter: Drafter, target: Target, prompt: Prompt) -> list[int]:
    """Accepted drafts (0..B-1) of the block at every anchor from the first answer token to the last but one."""
    device, dtype = target.embed.device, target.embed.dtype
    ids = torch.tensor(prompt.ids, device=device)
    anchors = torch.arange(prompt.prompt_length, len(ids) - 1, device=device)
    taps = target.taps(ids[None], list(drafter.shape.tap_ids))
    tables = drafter.tables(len(ids) + drafter.shape.block_size, device, dtype)
    with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
        states = drafter(
            taps, target.embed[ids[anchors]][None], target.embed[drafter.shape.mask_token_id], anchors[None], tables
        )[0]
    drafts = _argmax(states, target.head)
    where = anchors[:, None] + torch.arange(1, drafter.shape.block_size, device=device)
    truth = torch.where(where < len(ids), ids[where.clamp_max(len(ids) - 1)], -1)
    return (drafts == truth).int().cumprod(-1).sum(-1).tolist()


def _argmax(states: Tensor, head: Tensor) -> Tensor:
    return torch.cat([(part.to(head.dtype) @ head.t()).argmax(-1) for part in states.split(64)])


def walk(accepted: list[int]) -> tuple[int, int]:
    """(committed tokens, rounds) of greedy decoding; the first answer token comes from prefill and counts for neither."""
    position = rounds = 0
    while position < len(accepted):
        position += accepted[position] + 1
        rounds += 1
    return len(accepted), rounds


def accepted_length(drafter: Drafter, target: Target, prompts: list[Prompt]) -> dict[str, float]:
    """Committed tokens per round, bonus included, for each group of prompts."""
    totals: dict[str, list[int]] = {}
    for prompt in prompts:
        if len(prompt.ids) - prompt.prompt_length < 2:
            continue
        committed, rounds = walk(accepted_per_anchor(drafter, target, prompt))
        total = totals.setdefault(prompt.group, [0, 0])
        total[0] += committed
        total[1] += rounds
    return {group: round(committed / rounds, 3) for group, (committed, rounds) in sorted(totals.items())}
