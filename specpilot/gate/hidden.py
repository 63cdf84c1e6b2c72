"""The hidden pass: what a candidate answers to prompts that no worker has seen.

Asks the candidate only to generate, never to score: fixed-length legs at several concurrencies, a natural-stop
leg, sampled answers when the deployment samples, and a repeated prompt. Not timed for the score, so it may share the
machine. What it returns is judged by `specpilot.gate.verdict`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specpilot.contracts import Generation, Leg
from specpilot.evaluation.client import EngineClient
from specpilot.evaluation.errors import blame_candidate
from specpilot.evaluation.legs import run_leg
from specpilot.evaluation.prompts import Prompt, PromptPool
from specpilot.evaluation.server import EngineServer
from specpilot.gate.records import GatePolicy, HiddenPass, ReplayProbe

MOST_BLOCK = 32
"""Largest block size that an engine may state; published drafters use 4 to 16."""


def near_copy(prompt: Prompt, share: float = 0.3) -> Prompt:
    """The prompt with two neighbouring, different tokens swapped at about `share` of its length: the same text to a fuzzy key."""
    ids = list(prompt.ids)
    for at in range(int(share * len(ids)), len(ids) - 1):
        if ids[at] != ids[at + 1]:
            ids[at], ids[at + 1] = ids[at + 1], ids[at]
            break
    return prompt.model_copy(update={"id": f"{prompt.id}/near-copy-{share:g}", "ids": ids})


def probe_replay(client: EngineClient, prompt: Prompt, max_new_tokens: int) -> ReplayProbe:
    """Ask a prompt, a near copy, the prompt again, another near copy, and the prompt again; caches flushed before each."""

    def once(item: Prompt) -> Generation:
        client.flush_cache()
        return client.generate(item.ids, max_new_tokens=max_new_tokens, prompt_id=item.id)

    first, copy, again = once(prompt), once(near_copy(prompt)), once(prompt)
    other, last = once(near_copy(prompt, 0.6)), once(prompt)
    return ReplayProbe(fresh=[first, copy, other], repeated=[again, last])


def eos_token_ids(target: Path) -> list[int]:
    """Stop tokens of a checkpoint folder: generation_config.json and config.json, union, sorted; may be empty."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = target / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


def vocab_size(target: Path) -> int | None:
    """Number of tokens that a checkpoint folder's config.json states, at its top or in its text part; None if neither does."""
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    text = config.get("text_config")
    value = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return value if type(value) is int else None


def served_block_size(info: dict[str, Any]) -> int:
    """Largest number of tokens a decode round commits, as `/server_info` states; 1 without a drafter.

    Statements above `MOST_BLOCK` are not believed: a large block would loosen every check that counts rounds.
    """
    drafter = info.get("drafter")
    value = drafter.get("block_size") if isinstance(drafter, dict) else None
    return min(value, MOST_BLOCK) if type(value) is int and value > 0 else 1


def run_hidden_pass(
    server: EngineServer,
    pool: PromptPool,
    policy: GatePolicy,
    *,
    eos_ids: Sequence[int],
    temperature: float = 0.0,
    block_size: int | None = None,
    vocab: int | None = None,
) -> HiddenPass:
    """The whole pass on a started candidate.

    `block_size`: the drafter's, from the deployment; what the server states is used if it is larger. `vocab`: tokens that the
    target knows. Raises CandidateFailed
    when the candidate does not answer.
    """

    def leg(count: int, concurrency: int, tokens: int, **options: Any) -> Leg:
        server.client.flush_cache()
        prompts = pool.take("hidden", count)
        return run_leg(server, prompts, concurrency=concurrency, max_new_tokens=tokens, side="candidate", **options)

    with blame_candidate():
        info = server.client.server_info()
        fixed = policy.hidden_tokens
        legs = [leg(max(policy.hidden_prompts, c), c, fixed) for c in policy.hidden_concurrencies]
        natural = sampled = None
        if policy.natural_stop_prompts:
            natural = leg(policy.natural_stop_prompts, 2, policy.natural_tokens, ignore_eos=False)
        if temperature > 0.0:
            # No seed: one seed for a whole leg would give all its requests the same random numbers, and the test wants independent ones.
            sampled = leg(policy.sampled_prompts, 2, fixed, temperature=temperature)
        replay = probe_replay(server.client, pool.take("hidden", 1)[0], fixed)
    return HiddenPass(
        legs=legs,
        natural=natural,
        sampled=sampled,
        temperature=temperature,
        replay=replay,
        requested_tokens=fixed,
        natural_limit=policy.natural_tokens,
        eos_token_ids=list(eos_ids),
        vocab_size=vocab,
        block_size=max(block_size or 1, served_block_size(info)),
        startup_s=server.startup_s,
        server_info=info,
    )
