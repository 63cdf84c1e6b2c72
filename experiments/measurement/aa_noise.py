"""How noisy is one pair on this machine? The stock engine against itself, and what that means for a pair budget.

Runs A/A pairs of a deployment's stock engine through the very code that compares candidates and prints the
distribution of log-ratios, the pairs needed for given effects, and what a budget of pairs can detect. Do it on
the machine that will run `specpilot optimize`, with nothing else running.

    python experiments/measurement/aa_noise.py --deployment NAME [--pairs 16] [--tokens 64] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from specpilot.deployment import Deployment, find_deployment, load_deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.evaluation.compare import PairEvent, compare
from specpilot.evaluation.prompts import PromptPool
from specpilot.evaluation.server import EngineServer
from specpilot.evaluation.stats import detectable_effect, level_for, pairs_needed, sample_sd
from specpilot.models import ensure_models

EFFECTS = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5)
BUDGETS = (4, 6, 8, 12, 16, 24)


def measure(deployment: Deployment, variant: str, pairs: int, tokens: int, logs: Path) -> dict[str, Any]:
    """A/A comparison of `variant`; the log-ratios and the machine's facts."""
    models = ensure_models(deployment)
    tree = deployment.engine_tree()
    pool = PromptPool(deployment, models.target_dir, secrets.token_hex(8))
    settings = deployment.measurement.model_copy(
        update={"min_pairs": pairs, "max_pairs": pairs, "output_tokens_timed": tokens}
    )
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                EngineServer(
                    tree=tree,
                    spec=load_engine_spec(tree),
                    variant=variant,
                    commit="0" * 40,
                    models=models,
                    deployment=deployment,
                    log_dir=logs / side,
                )
            )
            for side in ("a", "b")
        )
        found, legs = compare(one, two, pool.stream("tuning"), settings, 0.05, regime=deployment.regime, on_pair=_show)
    ratios = [math.log(value) for value in found.pairs]
    neighbours = [a * b for a, b in zip(ratios, ratios[1:], strict=False)]
    variance = sum(value * value for value in ratios)
    return {
        "deployment": deployment.name,
        "variant": variant,
        "tokens_per_answer": tokens,
        "pairs": found.pairs,
        "ratio": found.ratio,
        "interval_95": [found.low, found.high],
        "decision": found.decision,
        "sd_log_ratio": sample_sd(ratios),
        "median_abs_log_ratio": sorted(abs(value) for value in ratios)[len(ratios) // 2],
        "largest_abs_log_ratio": max(abs(value) for value in ratios),
        "lag_1_autocorrelation": sum(neighbours) / variance if variance else 0.0,
        "seconds_per_pair": found.seconds / len(ratios),
        "decode_tokens_per_s": found.base.decode_tokens_per_s,
        "rate_spread": _spread([leg.generations[0].decoded / leg.generations[0].decode_s for leg in legs]),
        "machine": {"processor": platform.processor() or platform.machine(), **found.machine},
    }


def _spread(rates: list[float]) -> float:
    """Fastest over slowest single leg: how much the machine wanders when nothing is paired."""
    return max(rates) / min(rates)


def _show(event: PairEvent) -> None:
    print(
        f"pair {event.pair:3d}/{event.of}: {event.ratio:.4f}   so far {event.mean:.4f} [{event.low:.4f}, {event.high:.4f}]"
    )


def advice(sd: float, alpha: float) -> dict[str, Any]:
    """Pairs per effect and detectable effect per budget, for the first and the tenth comparison of a run."""
    levels = {"first comparison": level_for(1, 0, alpha), "tenth, after two gains": level_for(10, 2, alpha)}
    return {
        name: {
            "level": level,
            "pairs_for_effect": {str(effect): pairs_needed(sd, effect, level, most=200) for effect in EFFECTS},
            "detectable_with_pairs": {
                str(budget): round(detectable_effect(sd, budget, level), 4) for budget in BUDGETS
            },
        }
        for name, level in levels.items()
    }


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--variant", default="stock")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    deployment = load_deployment(find_deployment(arguments.deployment))
    with tempfile.TemporaryDirectory(prefix="aa-noise-") as logs:
        found = measure(deployment, arguments.variant, arguments.pairs, arguments.tokens, Path(logs))
    found["advice"] = advice(found["sd_log_ratio"], deployment.measurement.alpha)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
