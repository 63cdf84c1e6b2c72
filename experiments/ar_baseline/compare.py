"""AR decode speed of slim, transformers and vLLM, side by side in one run. See README.md. Reads a checkpoint; changes nothing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1] / "engines" / "slim"
PROMPTS = [
    "def quicksort(items):\n    ",
    "Question: A shop sells 12 pens for 9 dollars. How much do 20 pens cost?\nAnswer:",
    "The history of the lighthouse begins",
    "import json\n\ndef read_config(path):\n    ",
    "Dear Sir or Madam, I am writing to",
]
Decode = Callable[[list[int], int], float]
"""(prompt ids, new tokens) -> decode tokens per second, first token excluded."""


def main() -> int:
    args = _arguments()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    prompts = [tokenizer.encode(p * 3).ids for p in PROMPTS]
    with ExitStack() as stack:
        engines: dict[str, Decode] = {"slim ar": _slim(args, stack)}
        engines |= _transformers(args)
        if args.vllm_python:
            engines[f"vllm {args.vllm_dtype}"] = _vllm(args, _start_vllm(args, stack), stack)
        for named in args.vllm_url:
            dtype, url = named.split("=", 1)
            engines[f"vllm {dtype}"] = _vllm(args, url, stack)
        rates = _take_turns(engines, prompts, args.repeats, args.tokens)
    result = {
        "machine": _machine(args.threads),
        "target": args.target.name,
        "tokens": args.tokens,
        "rates_tokens_per_s": rates,
        "ratio_slim_over": {
            name: _spread(rates["slim ar"], values) for name, values in rates.items() if name != "slim ar"
        },
    }
    _show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    slower = [name for name, ratio in result["ratio_slim_over"].items() if ratio["median"] < 1]
    print("slim is slower than: " + ", ".join(slower) if slower else "slim is the fastest")
    return 1 if slower else 0


def _take_turns(
    engines: dict[str, Decode], prompts: list[list[int]], repeats: int, tokens: int
) -> dict[str, list[float]]:
    """Every engine decodes a prompt before the next prompt; the order turns round each time. One unmeasured pass first."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for decode in engines.values():
        decode(prompts[0], 8)
    for repeat in range(repeats):
        names = list(engines) if repeat % 2 == 0 else list(engines)[::-1]
        for name in names:
            rates[name].append(round(engines[name](prompts[repeat % len(prompts)], tokens), 2))
        print(f"  {repeat + 1}/{repeats}: " + "  ".join(f"{n} {rates[n][-1]}" for n in engines), flush=True)
    return rates


def _slim(args: argparse.Namespace, stack: ExitStack) -> Decode:
    command = [sys.executable, "-m", "slim_engine.server", "--target", str(args.target), "--no-speculation"]
    command += ["--compute", "bfloat16", "--threads", str(args.threads), "--variant", "ar"]
    url = _serve(command, stack, env={"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": str(args.threads)})
    client = stack.enter_context(httpx.Client(timeout=600))

    def decode(ids: list[int], tokens: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        stamps: list[float] = []
        with client.stream("POST", f"{url}/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    stamps += [time.perf_counter()] * len(json.loads(line[6:])["output_ids"])
        return _rate(stamps, tokens)

    return decode


def _start_vllm(args: argparse.Namespace, stack: ExitStack) -> str:
    command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.target)]
    command += ["--dtype", args.vllm_dtype, "--max-model-len", "1024", "--max-num-seqs", "1", "--enforce-eager"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(args.threads)}
    return _serve([*command, "--host", "127.0.0.1"], stack, {**env, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})


def _vllm(args: argparse.Namespace, url: str, stack: ExitStack) -> Decode:
    client = stack.enter_context(httpx.Client(timeout=600))

    def decode(ids: list[int], tokens: int) -> float:
        body = {"model": str(args.target), "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        stamps: list[float] = []
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    stamps.append(time.perf_counter())
        # A chunk may hold no text yet, or several tokens; the count is fixed, so first and last stamp give the rate.
        return (tokens - 1) / (stamps[-1] - stamps[0])

    return decode


def _transformers(args: argparse.Namespace) -> dict[str, Decode]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(args.threads)

    class Clock(BaseStreamer):
        """Stamps each new token."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def put(self, value: Any) -> None:
            self.stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    def decoder(model: Any, cache: str | None) -> Decode:
        def decode(ids: list[int], tokens: int) -> float:
            clock = Clock()
            prompt = torch.tensor([ids])
            with torch.inference_mode():
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=False,
                    cache_implementation=cache,
                    streamer=clock,
                )
            return _rate(clock.stamps[1:], tokens)  # the first stamp is the prompt

        return decode

    out: dict[str, Decode] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
        out[f"transformers {name} dynamic"] = decoder(model, None)
        out[f"transformers {name} static"] = decoder(model, "static")
    return out


def _serve(command: list[str], stack: ExitStack, env: dict[str, str]) -> str:
    """Starts a server on a free port, waits until it is healthy, stops it with the stack."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, **env}, stdout=subprocess.DEVNULL)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    url = f"http://127.0.0.1:{port}"
    for _ in range(1200):
        if process.poll() is not None:
            raise SystemExit(f"{command[2]} ended with code {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return url
        except httpx.TransportError:
            time.sleep(0.25)
    raise SystemExit(f"{command[2]} was not ready after 5 minutes")


def _rate(stamps: list[float], tokens: int) -> float:
    if len(stamps) != tokens:
        raise SystemExit(f"expected {tokens} tokens, saw {len(stamps)}")
    return (tokens - 1) / (stamps[-1] - stamps[0])


def _spread(ours: list[float], theirs: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {"median": round(statistics.median(ratios), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)}


def _machine(threads: int) -> dict[str, Any]:
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _show(result: dict[str, Any]) -> None:
    print(f"\n{result['target']} on {result['machine']}")
    for name, rates in result["rates_tokens_per_s"].items():
        ratio = result["ratio_slim_over"].get(name)
        line = f"{name:32s} {statistics.median(rates):7.1f} tokens/s (from {min(rates):.1f} to {max(rates):.1f})"
        if ratio:
            line += f"   slim / this: {ratio['median']:.2f} (from {ratio['min']:.2f} to {ratio['max']:.2f})"
        print(line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--vllm-python", help="python of an environment with vLLM; its own server is started")
    parser.add_argument("--vllm-dtype", default="float32", help="--dtype of that server")
    parser.add_argument(
        "--vllm-url",
        action="append",
        default=[],
        metavar="DTYPE=URL",
        help="a vLLM server that runs already; may be repeated",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
