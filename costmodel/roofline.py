"""Bounds: the shortest time a machine could need for a component, and for a whole decode round.

bound = max(bytes / bandwidth, operations / peak) + launches x launch overhead  (Williams et al., roofline; facts 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .arithmetic import FORMATS, Regime, Work, round_work
from .hardware import Hardware
from .shapes import DrafterShape, TargetShape


@dataclass(frozen=True)
class Bound:
    """The bound of one component on one machine, in milliseconds per round."""

    component: str
    bandwidth_ms: float
    compute_ms: float
    launch_ms: float
    bytes: float
    operations: float
    intensity: float
    """Operations per byte that must come from memory; 0 where nothing must."""

    @property
    def ms(self) -> float:
        """The bound: the slower of the two roofs, plus the launch floor."""
        return max(self.bandwidth_ms, self.compute_ms) + self.launch_ms

    @property
    def limit(self) -> str:
        """Which of the three terms is largest: `bandwidth`, `compute` or `launch`."""
        terms = {"bandwidth": self.bandwidth_ms, "compute": self.compute_ms, "launch": self.launch_ms}
        if not any(terms.values()):
            return "launch"
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class RoundBound:
    """Bounds of a decode round: by component, and fused."""

    components: tuple[Bound, ...]
    fused_ms: float
    """Bound if the memory traffic of one component hides behind the operations of another within the draft pass
    and within the target pass, and launches cost nothing. No engine with separate components reaches it."""

    @property
    def ms(self) -> float:
        """Sum of the component bounds: components run one after the other."""
        return sum(bound.ms for bound in self.components)


def bound(work: Work, hardware: Hardware, *, compute: str | None = None) -> Bound:
    """Bound of one component. Activations are charged to memory only where one step's exceed the cache."""
    spilled = work.activation_bytes if work.step_activation_bytes > hardware.cache_bytes else 0.0
    moved = work.weight_bytes + work.state_bytes + spilled
    return Bound(
        component=work.component,
        bandwidth_ms=moved / (hardware.bandwidth_gbs * 1e6),
        compute_ms=work.operations / (hardware.peak(compute) * 1e6),
        launch_ms=work.launches * hardware.launch_us * 1e-3,
        bytes=moved,
        operations=work.operations,
        intensity=work.operations / moved if moved else 0.0,
    )


def round_bound(works: Sequence[Work], hardware: Hardware, *, compute: str | None = None) -> RoundBound:
    """Bound every component of a round, and the round."""
    bounds = tuple(bound(work, hardware, compute=compute) for work in works)
    draft = [b for b in bounds if b.component.startswith("draft.")]
    rest = [b for b in bounds if not b.component.startswith("draft.")]
    return RoundBound(components=bounds, fused_ms=_fused(draft) + _fused(rest))


def _fused(bounds: Sequence[Bound]) -> float:
    return max(sum(b.bandwidth_ms for b in bounds), sum(b.compute_ms for b in bounds))


def bounds_by_format(
    target: TargetShape, drafter: DrafterShape | None, regime: Regime, hardware: Hardware
) -> dict[str, RoundBound]:
    """Bound of the same round in each weight format: what a narrower format could buy."""
    return {
        name: round_bound(round_work(target, drafter, replace(regime, weight_bits=bits)), hardware)
        for name, bits in FORMATS.items()
    }
