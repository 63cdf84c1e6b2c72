"""Measure this engine's variants against each other on this machine: `bench.py [VARIANT ...]`.

All variants are started, one runs at a time while the others are stopped by signal; every prompt goes through
every variant in rotating order, so that ratios hold even where the machine's speed wanders. Decode rate: tokens
after the first chunk over the time from there to the end of the answer, on the client's clock.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

import layout  # type: ignore[import-not-found]
import servers  # type: ignore[import-not-found]


def main() -> None:
    """Print tokens per second and ratios."""
    info = layout.manifest()
    known = [name for name in info["variants"] if name != "reference"]
    parser = argparse.ArgumentParser(
        prog="bench.sh", description="Decode tokens per second of the variants, interleaved."
    )
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: {' '.join(known)}")
    parser.add_argument("--prompts", type=int, default=6, help="prompts per variant (default 6)")
    parser.add_argument("--tokens", type=int, default=int(info["output_tokens"]), help="new tokens per prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    variants = list(dict.fromkeys(options.variants)) or known
    for name in variants:
        if name not in info["variants"]:
            layout.fail(layout.INVALID, f"unknown variant {name!r}", f"one of: {', '.join(known)}.")
    if options.prompts < 1 or options.tokens < 2:
        layout.fail(layout.INVALID, "--prompts must be at least 1 and --tokens at least 2")
    rates = measure(info, variants, options.prompts, options.tokens, quiet=options.json)
    result = summarise(rates)
    print(json.dumps(result) if options.json else table(result))


def measure(info: dict, variants: list[str], count: int, tokens: int, quiet: bool) -> dict[str, list[float]]:
    """Variant -> decode tokens per second, one per prompt. The first prompt warms every variant up."""
    prompts = servers.load_prompts(info, "hidden", count + 1)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    with servers.started(info, variants) as running:
        for number, ids in enumerate(prompts):
            turn = number % len(running)
            for engine in [*running[turn:], *running[:turn]]:
                engine.thaw()
                answer = engine.generate(ids, min(tokens, 16) if number == 0 else tokens)
                engine.freeze()
                if number:
                    rates[engine.variant].append(answer.decoded / answer.decode_s if answer.decoded else 0.0)
                    if not quiet:
                        print(
                            f"  prompt {number}/{count}  {engine.variant:<9}{rates[engine.variant][-1]:8.1f} tokens/s",
                            flush=True,
                        )
    return rates


def summarise(rates: dict[str, list[float]]) -> dict:
    """Medians, and paired ratios (geometric mean, smallest, largest) of every variant over `ar` and `stock`."""
    ratios = []
    for over in ("ar", "stock"):
        for name, values in rates.items():
            if over in rates and name != over:
                pairs = [value / base for value, base in zip(values, rates[over], strict=True) if value and base]
                if pairs:
                    mean = math.exp(statistics.fmean(map(math.log, pairs)))
                    ratios.append({"of": name, "over": over, "ratio": mean, "low": min(pairs), "high": max(pairs)})
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"decode_tokens_per_s": medians, "ratios": ratios, "rates": rates}


def table(result: dict) -> str:
    """The result for people."""
    lines = ["", "variant    decode tokens/s (median over prompts)"]
    lines += [f"{name:<11}{value:.1f}" for name, value in result["decode_tokens_per_s"].items()]
    lines += ["", "ratio                 mean   smallest and largest pair"]
    for row in result["ratios"]:
        words = f"{row['of']} over {row['over']}"
        lines.append(f"{words:<20}{row['ratio']:6.2f}x   {row['low']:.2f}x to {row['high']:.2f}x")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
