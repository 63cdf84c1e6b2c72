"""From a trace and two configs to a gap table, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .arithmetic import Regime, round_work
from .drafters import drafter_shape
from .gaps import GapTable, gap_table
from .hardware import Hardware
from .roofline import RoundBound, bounds_by_format, round_bound
from .shapes import SCOPES, DrafterShape, TargetShape
from .targets import Config, target_shape
from .trace import Profile, attribute, load_events

Source = Config | Path | str


def shapes(target_config: Source, drafter_config: Source | None) -> tuple[TargetShape, DrafterShape | None]:
    """Read both configs; None, `none` and `ngram` mean that the drafter has no weights."""
    weightless = drafter_config is None or drafter_config in ("none", "ngram")
    return target_shape(target_config), None if weightless else drafter_shape(drafter_config)  # type: ignore[arg-type]


def bound_of(
    target_config: Source,
    drafter_config: Source | None,
    hardware: Hardware,
    regime: Regime,
    *,
    compute: str | None = None,
) -> RoundBound:
    """Bound of a decode round at a regime."""
    target, drafter = shapes(target_config, drafter_config)
    return round_bound(round_work(target, drafter, regime), hardware, compute=compute)


def analyse(
    trace_path: Path | str | None,
    target_config: Source,
    drafter_config: Source | None,
    hardware: Hardware,
    regime: Regime,
    *,
    round_ms: float | None = None,
    commit: str = "",
    scopes: Mapping[str, str] | None = None,
    compute: str | None = None,
) -> GapTable:
    """Compare a profiled engine with the bound of its round.

    `regime` gives rows, requests, context length, accepted length and the weight format for the bound. When
    there is a trace, the rows, requests, context length and accepted length that its rounds report win. Without a
    trace the measured columns are zero. `scopes` is engine.toml's `[scopes]`. `round_ms`: the unprofiled round.
    """
    target, drafter = shapes(target_config, drafter_config)
    profile: Profile | None = None
    if trace_path is not None:
        events = load_events(trace_path)
        names = {**{name: name for name in SCOPES}, **(scopes or {})}
        regime = observed(regime, attribute(events, (), scopes=names), drafter)
        expected = [work.component for work in round_work(target, drafter, regime)]
        profile = attribute(events, expected, scopes=names)
    bound = round_bound(round_work(target, drafter, regime), hardware, compute=compute)
    described: dict[str, Any] = {
        **hardware.as_dict(),
        "regime": asdict(regime),
        "fused_bound_ms": bound.fused_ms,
        "bound_ms_by_format": {k: v.ms for k, v in bounds_by_format(target, drafter, regime, hardware).items()},
        "intensity": {b.component: b.intensity for b in bound.components},
        "operations": {b.component: b.operations for b in bound.components},
        "bytes": {b.component: b.bytes for b in bound.components},
    }
    warnings = list(profile.warnings) if profile else []
    mean_bound = None
    if profile and profile.varied:
        mean_bound = _mean_bound(target, drafter, regime, hardware, profile.widths, compute)
        warnings.append(
            f"the engine varies its width: {profile.rounds} of {sum(profile.widths.values())} rounds had {regime.rows} rows, and the "
            f"rows of the table are of those; the round's bound is the mean over all {len(profile.widths)} widths"
        )
    if hardware.lower_bound:
        warnings.append(f"{hardware.name}: its figures are lower bounds, so real bounds are shorter than shown")
    return gap_table(
        bound,
        profile.component_ms if profile else None,
        round_ms=round_ms,
        bound_ms=mean_bound,
        accepted_length=regime.accepted_length,
        requests=regime.requests,
        commit=commit,
        hardware=described,
        warnings=warnings,
    )


def _mean_bound(
    target: TargetShape,
    drafter: DrafterShape | None,
    regime: Regime,
    hardware: Hardware,
    widths: Mapping[int, int],
    compute: str | None,
) -> float:
    """Milliseconds: the bound of a round, averaged over rounds of several widths (target rows, all requests: how often)."""
    total = 0.0
    for rows, count in widths.items():
        one = replace(regime, rows=max(1, round(rows / regime.requests)))
        total += count * round_bound(round_work(target, drafter, one), hardware, compute=compute).ms
    return total / sum(widths.values())


def observed(regime: Regime, profile: Profile, drafter: DrafterShape | None = None) -> Regime:
    """The regime with what the trace's rounds report in place of what was assumed.

    A draft pass is assumed where drafting took time, or more than one row was verified.
    """
    requests = max(1, round(profile.requests)) if profile.requests else regime.requests
    rows = max(1, round(profile.rows / requests)) if profile.rows else regime.rows
    context = round(profile.context_len) if profile.context_len is not None else regime.context_len
    drafting = any(time > 0 for name, time in profile.component_ms.items() if name.startswith("draft."))
    block = drafter.block_size if drafter is not None and drafting else None
    return replace(
        regime,
        rows=rows,
        requests=requests,
        context_len=context,
        accepted_length=profile.accepted_length or regime.accepted_length,
        draft_rows=round(profile.draft_rows) if profile.draft_rows else regime.draft_rows or block,
        draft_vocab=round(profile.draft_vocab) if profile.draft_vocab else regime.draft_vocab,
    )
