"""The gap table: how far each component of the decode round is from its bound, and what closing the gap would gain.

Field names equal those of `specpilot.contracts.Gap` and `GapTable`, so `dataclasses.asdict` translates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import CostModelError
from .roofline import Bound, RoundBound

HOST = Bound("host", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Host work has no lower bound: all of it is recoverable in principle."""


@dataclass(frozen=True)
class Gap:
    """One component of the round, in milliseconds per round."""

    component: str
    measured_ms: float
    bound_ms: float
    ratio: float
    """Bound over measured: 1.0 is the roof, above it the model is wrong. 0 where nothing was measured."""
    share: float
    """Share of the measured round."""
    recoverable_ms: float
    expected_gain: float
    """End-to-end decode ratio if this component alone reached its bound."""
    limit: str
    """`bandwidth`, `compute` or `launch`."""


@dataclass(frozen=True)
class GapTable:
    """All components, most recoverable time first. `round_ms` is 0 where nothing was measured."""

    commit: str
    rows: list[Gap]
    round_ms: float
    bound_ms: float
    """Sum over the components; the mean over all rounds where an engine varies its width."""
    accepted_length: float
    tokens_per_s: float
    tokens_per_s_at_bound: float
    share_of_bound: float
    """Bound over measured round: the share of the attainable speed that the engine reaches. A component that was measured below
    its bound (the model is wrong there) counts as at its bound, so that it does not make up for the others. Where the width
    varies, only the commonest width's components are known: the bound of all is cut by the share that they undercut theirs by."""
    warnings: list[str] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def profiled_ms(self) -> float:
        """Milliseconds of the profiled round, tracing on: the sum of its components. `round_ms` is timed with tracing off."""
        return sum(row.measured_ms for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain form that `contracts.GapTable` accepts."""
        return asdict(self)


def gap_table(
    bound: RoundBound,
    measured_ms: Mapping[str, float] | None,
    *,
    round_ms: float | None = None,
    bound_ms: float | None = None,
    accepted_length: float = 1.0,
    requests: int = 1,
    commit: str = "",
    hardware: Mapping[str, Any] | None = None,
    warnings: Iterable[str] = (),
) -> GapTable:
    """Compare measured components with their bounds and rank them by recoverable time.

    `measured_ms` comes from a profile (None: a table of bounds only). `round_ms` is the round time without
    the profiler where it is known; shares and expected gains refer to the profiled round, the rates to `round_ms`.
    `bound_ms`: the round's bound where it is not the sum of the components' (rounds of several widths).
    """
    profiled = sum(measured_ms.values()) if measured_ms else 0.0
    whole = round_ms if round_ms is not None else profiled
    least = bound.ms if bound_ms is None else bound_ms
    if whole < 0 or profiled < 0:
        raise CostModelError(f"round times must not be negative: {whole} ms, profiled {profiled} ms")
    bounds = {b.component: b for b in bound.components}
    names = [*bounds, *(name for name in measured_ms or {} if name not in bounds)]
    rows = [_row(name, bounds.get(name), (measured_ms or {}).get(name, 0.0), profiled) for name in names]
    beaten = sum(max(row.bound_ms - row.measured_ms, 0.0) for row in rows if row.measured_ms > 0)
    notes = [*warnings, *_warn(rows, bounds, bool(measured_ms)), *_warn_round(least, whole, profiled)]
    committed = accepted_length * requests * 1e3
    return GapTable(
        commit=commit,
        rows=sorted(rows, key=lambda row: (-row.recoverable_ms, -row.bound_ms)),
        round_ms=whole,
        bound_ms=least,
        accepted_length=accepted_length,
        tokens_per_s=committed / whole if whole else 0.0,
        tokens_per_s_at_bound=committed / least if least else 0.0,
        share_of_bound=_reached(bound, beaten) * least / whole if whole else 0.0,
        warnings=notes,
        hardware=dict(hardware or {}),
    )


def _reached(bound: RoundBound, beaten: float) -> float:
    """Share of the bound that is left without what components undercut it by; the rows' share, whatever other widths there were."""
    return max(bound.ms - beaten, 0.0) / bound.ms if bound.ms else 0.0


def _row(name: str, bound: Bound | None, measured: float, profiled: float) -> Gap:
    bound = bound or HOST
    recoverable = max(measured - bound.ms, 0.0)
    return Gap(
        component=name,
        measured_ms=measured,
        bound_ms=bound.ms,
        ratio=bound.ms / measured if measured > 0 else 0.0,
        share=measured / profiled if profiled > 0 else 0.0,
        recoverable_ms=recoverable,
        expected_gain=gain_of_saving(profiled, recoverable),
        limit=bound.limit,
    )


def gain_of_saving(round_ms: float, saved_ms: float) -> float:
    """Decode ratio when `saved_ms` of a round of `round_ms` are saved and the accepted length stays."""
    left = round_ms - saved_ms
    if round_ms <= 0:
        return 1.0
    return round_ms / left if left > 0 else float("inf")


def _warn(rows: Sequence[Gap], bounds: Mapping[str, Bound], measured: bool) -> list[str]:
    if not measured:
        return []
    warnings = [
        f"{row.component}: measured {row.measured_ms:.3f} ms is below its bound of {row.bound_ms:.3f} ms "
        f"({row.ratio:.0%} of the roof): the engine does less than the model counts there, or the model is wrong"
        for row in rows
        if row.ratio > 1.0
    ]
    unknown = [row.component for row in rows if row.component not in bounds and row.measured_ms > 0]
    if unknown:
        warnings.append(f"no arithmetic for {', '.join(unknown)}: bound taken as zero, so the gap is overstated")
    return warnings


def _warn_round(bound_ms: float, round_ms: float, profiled: float) -> list[str]:
    warnings = []
    if round_ms and bound_ms > round_ms:
        warnings.append(
            f"the round takes {round_ms:.3f} ms, its bound is {bound_ms:.3f} ms ({bound_ms / round_ms:.0%}): "
            f"the model is wrong, or the machine is faster now than when it was measured"
        )
    if profiled and round_ms and abs(profiled - round_ms) > 0.15 * round_ms:
        warnings.append(
            f"profiled components add up to {profiled:.3f} ms, the round without the profiler takes {round_ms:.3f} ms: "
            f"compare shares, not times"
        )
    return warnings


def predicted_gain(table: GapTable, components: Iterable[str], *, reached: float = 1.0) -> float:
    """Decode ratio if these components together got to `reached` (0..1] of their bound's speed.

    A component that is already there saves nothing. Raises `CostModelError` for an unknown component.
    """
    if not 0.0 < reached <= 1.0:
        raise CostModelError(f"reached must be above 0 and at most 1, got {reached}")
    rows = {row.component: row for row in table.rows}
    wanted = set(components)
    unknown = wanted - set(rows)
    if unknown:
        raise CostModelError(f"no component {', '.join(sorted(unknown))} in this table; it has {', '.join(rows)}")
    saved = sum(max(rows[name].measured_ms - rows[name].bound_ms / reached, 0.0) for name in wanted)
    return gain_of_saving(table.profiled_ms, saved)
