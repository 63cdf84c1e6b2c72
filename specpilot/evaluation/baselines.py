"""The named figures of one machine: `ar`, `stock`, `final`, `final-ar`, measured together or not at all.

Round-robin over the same prompts with a rotating order, one engine running at a time, the others frozen. Rates
wander between sessions by tens of per cent, so every ratio comes from this session's pairs; absolute figures are
medians and go with the machine's facts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from specpilot.contracts import Leg, Record
from specpilot.deployment import MeasurementSettings, Regime
from specpilot.evaluation import legs as figures
from specpilot.evaluation.callers import require_uncalled
from specpilot.evaluation.lease import CpuWatch, DeviceLease, other_engines
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.evaluation.stats import confidence_sequence

OVER = ("ar", "stock")
"""Variants that ratios are quoted against."""

WARM_UP_TOKENS = 24


class VariantFigures(Record):
    """One variant; rates and times are medians over prompts (batches of `concurrency` prompts above 1)."""

    name: str
    commit: str
    variant: str
    decode_tokens_per_s: float
    end_to_end_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    """Seconds per output token after the first chunk."""
    accepted_length: float | None
    target_forwards_per_token: float | None
    startup_s: float
    tokens: int
    rates: list[float]
    """Decode tokens per second, per batch, in the prompts' order."""


class RatioFigure(Record):
    """`of` over `over`, paired by prompt. [`low`, `high`] belongs to `ratio`, the geometric mean."""

    of: str
    over: str
    ratio: float
    median: float
    low: float
    high: float
    end_to_end_ratio: float
    end_to_end_low: float
    end_to_end_high: float
    pairs: list[float]


class Baselines(Record):
    """What was measured, in one session."""

    variants: dict[str, VariantFigures]
    ratios: list[RatioFigure]
    prompts: int
    prompt_sets: list[str]
    """Where they are from: tuning, or closing (hidden ones that nothing else asks)."""
    alpha: float
    seconds: float
    machine: dict[str, Any] = Field(default_factory=dict)
    withheld: dict[str, str] = Field(default_factory=dict)
    """Variants that were measured and whose figures are worth nothing, with the reason."""
    judged: dict[str, str] = Field(default_factory=dict)
    """Variants whose answers there were held against the reference, with what was found: tokens forced, exact, near-ties."""

    def without(self, faults: Mapping[str, str]) -> Baselines:
        """The same without the figures of the variants named, nor any ratio that they are part of."""
        return self.model_copy(
            update={
                "variants": {name: found for name, found in self.variants.items() if name not in faults},
                "ratios": [found for found in self.ratios if not {found.of, found.over} & faults.keys()],
                "withheld": {**self.withheld, **faults},
            }
        )

    def ratio(self, of: str, over: str) -> RatioFigure:
        """The ratio of two variants. Raises KeyError when it was not measured."""
        for found in self.ratios:
            if (found.of, found.over) == (of, over):
                return found
        raise KeyError(f"{of} over {over} was not measured")


def measure_variants(
    servers: Sequence[tuple[str, EngineServer]],
    prompts: Sequence[Prompt],
    *,
    settings: MeasurementSettings,
    regime: Regime,
    alpha: float | None = None,
    on_leg: Callable[[str, int, float], None] | None = None,
    keep: dict[str, list[Leg]] | None = None,
) -> Baselines:
    """Every started server answers every prompt; needs at least two batches of `regime.concurrency` prompts.

    `alpha` (of each interval; default `settings.alpha`): these are figures, not a search, so no share of the run's
    error rate is spent. `on_leg(name, batch, tokens per second)` reports progress; `keep` receives every timed leg by name, for
    whoever judges the answers. Servers are usable afterwards.
    Raises EngineError.
    """
    size = regime.concurrency
    batches = [list(prompts[k : k + size]) for k in range(0, len(prompts) - size + 1, size)]
    if len(batches) < 2 or len({name for name, _ in servers}) < len(servers) or not servers:
        raise ValueError(f"needs differently named servers and at least {2 * size} prompts, got {len(prompts)}")
    began = time.monotonic()
    tokens = settings.output_tokens_timed or regime.output_tokens
    watch = CpuWatch()
    legs: dict[str, list[Leg]] = {} if keep is None else keep
    legs.update({name: [] for name, _ in servers})
    with DeviceLease("cpu", "measuring baselines") as lease:
        try:
            for _, server in servers:
                server.freeze()
            strangers = other_engines()
            for _, server in servers:
                _warm_up(server, batches[0], regime, min(tokens, WARM_UP_TOKENS))
            for number, batch in enumerate(batches):
                turn = number % len(servers)
                for name, server in [*servers[turn:], *servers[:turn]]:
                    leg = _leg(server, name, batch, regime, tokens, watch)
                    for _, idle in servers:
                        require_uncalled(idle)  # all are stopped
                    legs[name].append(leg)
                    if on_leg is not None:
                        on_leg(name, number, figures.decode_rate(leg))
        finally:
            for _, server in servers:
                server.thaw()
    level = settings.alpha if alpha is None else alpha
    return Baselines(
        variants={name: _figures(name, server, legs[name]) for name, server in servers},
        ratios=[_ratio(of, over, legs, level) for over in OVER if over in legs for of in legs if of != over],
        prompts=len(batches) * size,
        prompt_sets=sorted({prompt.id.partition("/")[0] for prompt in prompts}),
        alpha=level,
        seconds=time.monotonic() - began,
        machine={"device": lease.device, "other_engines": strangers, **watch.summary()},
    )


def _warm_up(server: EngineServer, batch: list[Prompt], regime: Regime, tokens: int) -> None:
    """Requests like the timed ones on cut prompts, so that no timed prompt has been seen before."""
    cut = [prompt.model_copy(update={"ids": prompt.ids[: max(1, len(prompt.ids) * 2 // 3)]}) for prompt in batch]
    with server.active():
        figures.run_under_load(server, cut, regime, tokens, "base")


def _leg(server: EngineServer, name: str, batch: list[Prompt], regime: Regime, tokens: int, watch: CpuWatch) -> Leg:
    with server.active():
        server.client.flush_cache()
        watch.start(server.cpu_seconds())
        leg = figures.run_under_load(server, batch, regime, tokens, name)
        watch.stop(server.cpu_seconds())
    figures.require_full(leg, tokens)
    return leg


def _figures(name: str, server: EngineServer, legs: list[Leg]) -> VariantFigures:
    total = figures.summarise(server, legs)
    rates = [figures.decode_rate(leg) for leg in legs]
    answers = [g for leg in legs for g in leg.generations]
    return VariantFigures(
        name=name,
        commit=server.commit,
        variant=server.variant,
        decode_tokens_per_s=statistics.median(rates),
        end_to_end_tokens_per_s=statistics.median(figures.end_to_end_rate(leg) for leg in legs),
        ttft_s=total.ttft_s,
        tpot_s=statistics.median(g.decode_s / g.decoded for g in answers),
        accepted_length=total.accepted_length,
        target_forwards_per_token=total.target_forwards_per_token,
        startup_s=total.startup_s,
        tokens=total.tokens,
        rates=rates,
    )


def _ratio(of: str, over: str, legs: dict[str, list[Leg]], alpha: float) -> RatioFigure:
    def logs(rate: Callable[[Leg], float]) -> list[float]:
        return [math.log(rate(a) / rate(b)) for a, b in zip(legs[of], legs[over], strict=True)]

    decode, whole = logs(figures.decode_rate), logs(figures.end_to_end_rate)
    first, second = confidence_sequence(decode, alpha), confidence_sequence(whole, alpha)
    return RatioFigure(
        of=of,
        over=over,
        ratio=math.exp(first.mean),
        median=math.exp(statistics.median(decode)),
        low=first.low_ratio,
        high=first.high_ratio,
        end_to_end_ratio=math.exp(second.mean),
        end_to_end_low=second.low_ratio,
        end_to_end_high=second.high_ratio,
        pairs=[math.exp(value) for value in decode],
    )
