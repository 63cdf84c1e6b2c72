"""Observe: profile the head engine and compare each component of its decode round with its bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from specpilot.contracts import GapTable, Generation
from specpilot.costmodel.analyse import analyse, bound_of
from specpilot.costmodel.arithmetic import W12_BITS, Regime
from specpilot.costmodel.hardware import Hardware
from specpilot.costmodel.targets import read_config
from specpilot.errors import InfrastructureError, SpecPilotError
from specpilot.evaluation.lease import DeviceLease
from specpilot.evaluation.legs import run_under_load
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.gate.records import TimeFloor
from specpilot.loop.context import RunContext
from specpilot.loop.machine import hardware_of, measure_again

PROFILED_PROMPTS = 3
MOST_TRACE_BYTES = 1 << 29
KV_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8_e4m3": 8.0, "fp8_e5m2": 8.0}
UNSURE_ROOF = 0.5
"""Share of the floor that is used when the machine's roofs are only lower bounds (probed while busy, or without a compiler)."""


def observe(context: RunContext, key: str, commit: str, variant: str = "final", roofs_now: bool = False) -> GapTable:
    """The gap table of `commit`, measured once per key.

    `roofs_now`: compare with roofs measured just before and just after, instead of those of the run's beginning. For a
    figure that is quoted: a virtual machine wanders within a quarter of an hour.

    A merged engine that no longer writes a trace that can be read costs the run its table, not its end: the gate asks
    for tokens and time, never for a profile. The table is empty then and a warning says why. Of the engine as found
    that is an error.
    """

    def run() -> GapTable:
        before = measure_again(context) if roofs_now else None
        with context.engine(commit, variant, key) as server:
            try:
                return profile_engine(context, key, server, before)
            except Exception as error:  # a trace is whatever a candidate's code writes; what it breaks is not known
                ours = isinstance(error, SpecPilotError) and not isinstance(error, InfrastructureError)
                if commit == context.trees.first_commit or ours:
                    raise
                text = f"no component table of {commit[:12]}: it cannot be profiled any more: {str(error)[:300]}"
                context.say("note", level="warning", text=text)
                return no_gaps(commit)

    table: GapTable = context.journal.step(key, run, model=GapTable)
    context.say("gaps", **table.model_dump(mode="json"))
    return table


def no_gaps(commit: str) -> GapTable:
    """The table of an engine of which nothing is known."""
    return GapTable(
        commit=commit,
        rows=[],
        round_ms=0.0,
        bound_ms=0.0,
        accepted_length=1.0,
        tokens_per_s=0.0,
        tokens_per_s_at_bound=0.0,
        share_of_bound=0.0,
    )


def profile_engine(context: RunContext, key: str, server: EngineServer, before: Hardware | None = None) -> GapTable:
    """Decodes a few tuning prompts without the profiler (true round time), and again with it (component shares), under
    the deployment's load: so many requests at a time, at its temperature.

    `before`: roofs measured a moment ago; they are measured again afterwards and the means are the roofs. None: those
    recorded when the run began.
    """
    load = context.deployment.regime
    prompts = context.prompts(key).take("tuning", max(PROFILED_PROMPTS, load.concurrency) + 1)
    tokens = min(context.deployment.timed_tokens(), 96)

    def decode(some: list[Prompt]) -> list[Generation]:
        return run_under_load(server, some, load, tokens, "base").generations

    cache = context.logs / "cache" / server.commit[:12]
    with DeviceLease(purpose=f"profiling {server.commit[:12]}"):
        decode(prompts[:1])
        plain = decode(prompts[1:])
        server.client.start_profile(cache)
        decode(prompts[1:])
        trace = server.client.stop_profile()
    if not trace.resolve().is_relative_to(cache.resolve()):
        raise InfrastructureError(f"{server} wrote its trace to {trace}, not into {cache}", "use output_dir as given")
    if not trace.is_file() or trace.stat().st_size > MOST_TRACE_BYTES:  # a pipe would be waited for, for ever
        raise InfrastructureError(
            f"{server} left no trace at {trace}, or one of more than {MOST_TRACE_BYTES >> 20} MiB"
        )
    identity = context.identity
    hardware = hardware_of(context) if before is None else before.until(measure_again(context))
    table = analyse(
        trace,
        Path(identity.target_dir),
        identity.drafter,
        hardware,
        regime_of(context, plain, server.client.server_info()),
        round_ms=round_milliseconds(plain),
        commit=server.commit,
        scopes=context.spec.scopes,
    )
    if not all(map(math.isfinite, (table.round_ms, table.bound_ms, table.accepted_length, table.share_of_bound))):
        raise InfrastructureError(f"the trace of {server} holds figures that are not finite")
    return GapTable.model_validate(table.as_dict())


def regime_of(context: RunContext, generations: list[Generation], info: dict[str, Any]) -> Regime:
    """What is assumed where a trace does not say: whole blocks, mid-answer context, the cache that the engine states."""
    length = accepted_length(generations)
    context_len = sum(len(g.prompt_ids) + len(g.output_ids) / 2 for g in generations) / len(generations)
    return Regime(
        rows=context.identity.block_size or 1,
        requests=context.deployment.regime.concurrency,
        context_len=round(context_len),
        kv_bits=kv_bits(info, Path(context.identity.target_dir)),
        accepted_length=length,
    )


def kv_bits(info: dict[str, Any], target: Path) -> float:
    """Bits of one cached value: what `/server_info` states as `kv_cache_dtype`, else the checkpoint's own type.

    `auto` means the checkpoint's type, as in SGLang. Raises `InfrastructureError` for a type it does not know.
    """
    stated = str(info.get("kv_cache_dtype") or "auto")
    if stated == "auto":
        config = read_config(target)
        stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if stated not in KV_BITS:
        raise InfrastructureError(f"the engine caches keys and values as {stated!r}", f"known: {', '.join(KV_BITS)}.")
    return KV_BITS[stated]


def accepted_length(generations: list[Generation]) -> float:
    """Committed tokens per decode round; 1 where the engine reports no rounds."""
    rounds = sum(g.rounds or 0 for g in generations)
    return sum(len(g.output_ids) - 1 for g in generations) / rounds if rounds else 1.0


def round_milliseconds(generations: list[Generation]) -> float:
    """Client-side milliseconds per decode round, from the first chunk to the end of each answer."""
    rounds = sum(g.rounds or len(g.output_ids) - 1 for g in generations)
    return 1e3 * sum(g.decode_s for g in generations) / rounds


def time_floor(context: RunContext) -> TimeFloor:
    """Fastest possible decode round: the target's weights read once in the most compact lossless format.

    Optimistic on purpose: one row, no drafter, so that no honest candidate is ever called impossible.
    """
    hardware = hardware_of(context)
    regime = Regime(rows=1, context_len=0, weight_bits=W12_BITS)
    bound = bound_of(Path(context.identity.target_dir), "none", hardware.at_best(), regime)
    milliseconds = min(bound.ms, bound.fused_ms) * (UNSURE_ROOF if hardware.lower_bound else 1.0)
    return TimeFloor(round_s=milliseconds / 1e3, source="one row, 12-bit lossless weights, no drafter")
