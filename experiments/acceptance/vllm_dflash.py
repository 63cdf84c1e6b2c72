"""Accepted length of the drafter under vLLM's own `dflash` method, an independent reader of the same checkpoint.

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2 \
        python vllm_dflash.py --target DIR --drafter DIR --prompts hidden.jsonl [--per-source 10] [--tokens 128]

Needs an environment with vLLM (vllm-cpu 0.32.0 was used; see README.md). Greedy, float32, one request at a time. Two
figures a source: vLLM's own (1 + accepted drafts / rounds; it also counts accepted drafts past the end of an answer) and
the one the other scripts report (answer tokens after the first, per round). Writes the answers, so that
accepted_length.py --answers can say whether both decoded the same text.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


def read_prompts(path: Path, per_source: int) -> list[dict[str, str]]:
    """The first `per_source` prompts of each source in file order (0: all)."""
    taken: dict[str, int] = {}
    chosen = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        taken[record["source"]] = taken.get(record["source"], 0) + 1
        if not per_source or taken[record["source"]] <= per_source:
            chosen.append(record)
    return chosen


def counters(llm: Any) -> list[float]:
    """Values of the speculative counters, in the order of COUNTERS."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
    return [values.get(name, 0.0) for name in COUNTERS]


def mend_context_norm(_worker: Any) -> str:
    """Give each draft layer its own key norm over the context. Runs in the worker's process, where the model is.

    vLLM 0.32 normalises the context keys of all layers by one call with a [layers, head_dim] weight; its CPU kernel
    reads the first row only, so that layers 1.. get layer 0's weight (vllm-cpu 0.32.0; --stock leaves it so).
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer in range(len(keys)):
            ops.rms_norm(out[layer], keys[layer], self._k_norm_weights[layer], self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = normalise
    return f"mended in process {os.getpid()}"


def main() -> None:
    """Decode, then print and write one record a source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-source", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=7, help="draft tokens a round")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stock", action="store_true", help="do not mend vLLM's context key norm on the CPU")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.target), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=1, disable_log_stats=False, enable_prefix_caching=False,
        speculative_config={"method": "dflash", "model": str(args.drafter), "num_speculative_tokens": args.drafts},
    )  # fmt: skip
    if not args.stock:
        print(llm.collective_rpc(mend_context_norm), flush=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    records: dict[str, dict[str, float]] = {}
    answers = []
    for prompt in read_prompts(args.prompts, args.per_source):
        before = counters(llm)
        output = llm.generate([prompt["text"]], sampling, use_tqdm=False)[0].outputs[0]
        rounds, accepted = (after - old for after, old in zip(counters(llm), before, strict=True))
        answers.append(
            {"id": prompt["id"], "source": prompt["source"], "tokens": list(output.token_ids), "rounds": rounds}
        )
        print(f"{prompt['id']}: {len(output.token_ids)} tokens, {rounds:.0f} rounds", flush=True)
        total = records.setdefault(prompt["source"], {"prompts": 0, "answer_tokens": 0, "rounds": 0, "accepted": 0})
        for key, value in (
            ("prompts", 1),
            ("answer_tokens", len(output.token_ids)),
            ("rounds", rounds),
            ("accepted", accepted),
        ):
            total[key] += value
    for total in records.values():
        total["accepted_length_vllm"] = round(1 + total["accepted"] / total["rounds"], 3)
        total["accepted_length"] = round((total["answer_tokens"] - total["prompts"]) / total["rounds"], 3)
    print(json.dumps(records, indent=2))
    args.out.write_text(json.dumps({"sources": records, "answers": answers}))


if __name__ == "__main__":
    main()
