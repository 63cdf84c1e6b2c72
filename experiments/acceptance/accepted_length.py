"""Accepted length per source on held-out prompts: committed tokens per decode round, bonus included.

    python accepted_length.py --target DIR --drafter DIR --prompts hidden.jsonl            # plain torch, on transformers' target
    python accepted_length.py --url http://127.0.0.1:30000 --prompts hidden.jsonl          # a served engine, whatever its drafter

Greedy. The first answer token comes from prefill and counts for no round. The plain mode runs real draft-verify rounds
with plain_dflash.py and transformers' Llama with its own cache; it shares no code with engine or trainer. With
--answers (written by vllm_dflash.py) it also says how many answers are token for token the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from plain_dflash import PlainDrafter
from tokenizers import Tokenizer
from vllm_dflash import read_prompts


class Answer(NamedTuple):
    """Answer tokens (the first included) and the decode rounds they took."""

    tokens: list[int]
    rounds: int


class PlainDecoder:
    """Greedy block-speculative decoding on transformers' target with a PlainDrafter."""

    def __init__(self, target: Path, drafter: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.drafter = PlainDrafter(drafter)
        self.tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self.end: int = json.loads((target / "config.json").read_text())["eos_token_id"]

    def _forward(self, tokens: list[int], cache: object) -> tuple[list[int], torch.Tensor]:
        """The target's argmax after each of `tokens`, and its tapped states [len(tokens), T * H]."""
        out = self.model(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True, use_cache=True)
        taps = torch.cat([out.hidden_states[tap + 1][0] for tap in self.drafter.taps], -1)
        return [int(token) for token in out.logits[0].argmax(-1)], taps

    @torch.no_grad()
    def __call__(self, text: str, limit: int) -> Answer:
        """Decode at most `limit` tokens after `text`, stopping after the end-of-turn token."""
        from transformers import DynamicCache

        prompt = self.tokenizer.encode(text, add_special_tokens=False).ids
        cache = DynamicCache(config=self.model.config)
        predicted, taps = self._forward(prompt, cache)
        answer, rounds = [predicted[-1]], 0
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        while answer[-1] != self.end and len(answer) < limit:
            drafts = self.drafter.draft(taps, answer[-1], embedding, head)
            predicted, new_taps = self._forward([answer[-1], *drafts], cache)
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == predicted[accepted]:
                accepted += 1
            taps = torch.cat([taps, new_taps[: accepted + 1]])
            if accepted < len(drafts):
                cache.crop(accepted - len(drafts))  # negative: so many tokens off the end
            committed = predicted[: accepted + 1]
            if self.end in committed:
                committed = committed[: committed.index(self.end) + 1]
            answer += committed
            rounds += 1
        return Answer(answer[:limit], rounds)


def served(url: str) -> Callable[[str, int], Answer]:
    """The same through a served engine's /generate."""
    client = httpx.Client(base_url=url, timeout=600)

    def decode(text: str, limit: int) -> Answer:
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": limit}}
        reply = client.post("/generate", json=body).raise_for_status().json()
        return Answer(reply["output_ids"], reply["meta_info"]["spec_verify_ct"])

    return decode


def main() -> None:
    """Decode the prompts and print one line a source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--url", help="a served engine instead of the plain implementation")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-source", type=int, default=10, help="prompts of each source; 0: all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--answers", type=Path, nargs="*", default=[], help="results of other runs to compare the tokens with"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if not args.url and not (args.target and args.drafter):
        parser.error("give --target and --drafter, or --url")
    torch.set_num_threads(args.threads)
    decode = served(args.url) if args.url else PlainDecoder(args.target, args.drafter)
    began, answers = time.time(), []
    totals: dict[str, dict[str, float]] = {}
    for prompt in read_prompts(args.prompts, args.per_source):
        answer = decode(prompt["text"], args.tokens)
        print(f"{prompt['id']}: {len(answer.tokens)} tokens, {answer.rounds} rounds", flush=True)
        answers.append(
            {"id": prompt["id"], "source": prompt["source"], "tokens": answer.tokens, "rounds": answer.rounds}
        )
        total = totals.setdefault(prompt["source"], {"prompts": 0, "answer_tokens": 0, "rounds": 0})
        for key, value in (("prompts", 1), ("answer_tokens", len(answer.tokens)), ("rounds", answer.rounds)):
            total[key] += value
    for source, total in sorted(totals.items()):
        total["accepted_length"] = round((total["answer_tokens"] - total["prompts"]) / max(total["rounds"], 1), 3)
        print(
            f"{source}: {total['prompts']} prompts, {total['answer_tokens']} tokens, {total['rounds']} rounds, accepted length {total['accepted_length']}"
        )
    print(f"{time.time() - began:.0f} s")
    for path in args.answers:
        others = {other["id"]: other for other in json.loads(path.read_text())["answers"]}
        pairs = [(own["tokens"], others[own["id"]]["tokens"]) for own in answers if own["id"] in others]
        print(
            f"{path.name}: {sum(own == other for own, other in pairs)} of {len(pairs)} answers token for token the same"
        )
    if args.out:
        args.out.write_text(json.dumps({"sources": totals, "answers": answers}))


if __name__ == "__main__":
    main()
