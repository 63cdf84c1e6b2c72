"""A real SGLang server with and without W12, over HTTP: time a decode step, and a round of DFLASH verification.

    python experiments/w12/sglang_serving.py OUT.json [--layers 36] [--free] [-- further arguments of every server]

Needs SGLang 0.5.17 and SpecPilot in one environment. Qwen3-8B's shape with dummy weights: they say nothing about text, so the
drafter's guesses are never right and a round commits one token; what is measured is the time of a step or round. All four servers
run at once on one card, one answers at a time, in turn; ten requests each for one and for eight at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VARIABLE, FREE = "SPECPILOT_SGLANG_W12", "SPECPILOT_SGLANG_W12_FREE"  # of kernels/w12/sglang_plugin.py
TARGET = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
DRAFTER = TARGET | {
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "num_target_layers": 36, "block_size": 16,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
PORTS = {"ar": 31001, "ar w12": 31002, "dflash": 31003, "dflash w12": 31004}
PROMPT, TOKENS, REPEATS = 128, 192, 10


def write_models(folder: Path, layers: int) -> tuple[Path, Path]:
    """Configurations alone: the weights are dummies."""
    paths = []
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (folder / name).mkdir()
        changed = {"num_hidden_layers": layers} if name == "target" else {"num_target_layers": layers}
        (folder / name / "config.json").write_text(json.dumps(config | changed))
        paths.append(folder / name)
    return paths[0], paths[1]


def environment_of(name: str, free: bool) -> dict[str, str]:
    """W12 is a variable of a server's environment, and whether BF16 weights are freed another."""
    plain = {key: value for key, value in os.environ.items() if key not in (VARIABLE, FREE)}
    if not name.endswith("w12"):
        return plain
    return plain | {VARIABLE: "."} | ({FREE: "1"} if free else {})


def start(
    name: str, target: Path, drafter: Path, logs: Path, more: list[str], free: bool = False
) -> subprocess.Popen[bytes]:
    """One server."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), "--port", str(PORTS[name])]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache", "--dtype", "bfloat16"]
    command += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    command += ["--max-total-tokens", "16384", "--max-running-requests", "8", "--cuda-graph-max-bs", "8"]
    command += ["--context-length", "2048", "--mem-fraction-static", "0.9", *more]
    if name.startswith("dflash"):
        command += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(drafter)]
        command += ["--speculative-num-draft-tokens", "16"]
    log = (logs / f"{name.replace(' ', '-')}.log").open("wb")
    return subprocess.Popen(command, env=environment_of(name, free), stdout=log, stderr=log, start_new_session=True)


def ask(port: int, path: str, body: dict[str, Any] | None = None, timeout: float = 120) -> Any:
    """An open answer; raises OSError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout)


def wait(servers: dict[str, subprocess.Popen[bytes]], limit: float) -> None:
    """Until all are healthy; raises SystemExit with the name of one that is not."""
    until = time.monotonic() + limit
    for name, server in servers.items():
        while True:
            try:
                ask(PORTS[name], "/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"server {name!r} did not come up: see its log") from None
                time.sleep(1)
        print(f"{name} is up", flush=True)


def generate(port: int, seed: int) -> tuple[float, list[int]]:
    """Milliseconds a step or round between the first piece of the answer and the last, and the tokens."""
    ids = [(seed * 7919 + 31 * i) % 150000 for i in range(PROMPT)]
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    start, first, last = 0.0, {}, {}
    with ask(port, "/generate", {"input_ids": ids, "sampling_params": sampling, "stream": True}) as answer:
        for line in answer:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            last = json.loads(line[5:])
            if not first:
                start, first = time.perf_counter(), last["meta_info"]
        took = time.perf_counter() - start
    ended = last["meta_info"]
    # A server that speculates counts its rounds, from the first after the prompt on.
    counter = "spec_verify_ct" if "spec_verify_ct" in ended else "completion_tokens"
    return took * 1e3 / (ended[counter] - first.get(counter, 0)), list(last["output_ids"])


def measure(names: list[str]) -> dict[str, dict[str, Any]]:
    """Every server in turn."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for concurrency in (1, 8):
        times: dict[str, list[float]] = {name: [] for name in names}
        texts: dict[str, list[list[int]]] = {name: [] for name in names}
        for repeat in range(REPEATS + 1):
            for name in names:
                seeds = [100 * repeat + k for k in range(concurrency)]
                with ThreadPoolExecutor(concurrency) as pool:
                    answers = list(pool.map(generate, [PORTS[name]] * concurrency, seeds))
                if repeat:  # the first warms up
                    times[name].append(statistics.median(took for took, _ in answers))
                    texts[name] += [tokens for _, tokens in answers]
        for name in names:
            values = times[name]
            found[name][str(concurrency)] = {"ms": statistics.median(values), "least": min(values), "most": max(values)}
            other = name.removesuffix(" w12")
            if other != name and other in names:
                pairs = zip(texts[name], texts[other], strict=True)
                same = [_shared(a, b) for a, b in pairs]
                found[name][str(concurrency)]["first tokens shared with stock"] = statistics.median(same)
                ratio = found[other][str(concurrency)]["ms"] / found[name][str(concurrency)]["ms"]
                print(
                    f"{other}, {concurrency} at once: {found[other][str(concurrency)]}, W12 {found[name][str(concurrency)]}, x{ratio:.3f}"
                )
    return found


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    """Start, measure, record, end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--wait", type=float, default=420, help="seconds until all servers must be up")
    parser.add_argument("--only", help=f"of {', '.join(PORTS)}; by commas")
    parser.add_argument("--free", action="store_true", help=f"free the BF16 weights of the W12 servers ({FREE}=1)")
    parser.add_argument("more", nargs="*", help="further arguments of every server")
    options = parser.parse_args()
    names = [name for name in PORTS if not options.only or name in options.only.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        target, drafter = write_models(Path(scratch), options.layers)
        servers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in names:
                servers[name] = start(name, target, drafter, options.out.parent, options.more, options.free)
                time.sleep(2)  # each looks for free ports
            wait(servers, options.wait)
            found = {"layers": options.layers, "freed": options.free, "servers": measure(names)}
            options.out.write_text(json.dumps(found, indent=1))
        finally:
            for server in servers.values():
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
