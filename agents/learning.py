"""Turns a measured change into a mechanism that memory can keep: a name, preconditions, the patch.

Preconditions are as narrow as what was seen (this hardware class, target family, drafter, engine) unless the
submitter widened them; a wrong guess costs a later run one rejected attempt, never a wrong engine.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from specpilot.memory import Hardware, Mechanism, Preconditions, Regime
from specpilot.memory.records import VECTOR_LEVELS

from .base import ClaimDraft, PatchEdit, WorkContext
from .external import MechanismDraft


def mechanism_from(
    claim: ClaimDraft,
    patch: str,
    context: WorkContext,
    *,
    task: str = "",
    remember: MechanismDraft | None = None,
    first_tree: Path | None = None,
) -> Mechanism:
    """The mechanism of a change whose diff against its base is `patch`.

    `requires` is what the submitter names; where nothing is named and the patch does not apply to `first_tree` (a
    checkout of the engine's first commit), everything that was merged before it. Raises pydantic.ValidationError
    when the patch is not a diff.
    """
    requires = list(remember.requires) if remember else []
    if not requires and first_tree is not None and not PatchEdit(patch).applies(first_tree):
        requires = list(context.present)
    title = remember.title if remember else (task or claim.hypothesis).strip().splitlines()[0][:120]
    return Mechanism(
        name=remember.name if remember else _name(claim.component, title, patch),
        component=claim.component,
        title=title,
        hypothesis=claim.hypothesis,
        predicted_gain=claim.predicted_gain,
        requires=requires,
        preconditions=(remember.preconditions if remember else None) or _seen(context),
        counters=list(claim.counters),
        forbidden_counters=list(claim.forbidden_counters),
        patch=patch,
        notes=remember.notes if remember else "",
    )


def _seen(context: WorkContext) -> Preconditions:
    return Preconditions(
        hardware=Hardware(kind=context.hardware.kind, isa=_deciding(context.hardware)),
        architectures=[context.architecture],
        drafters=[context.drafter],
        regime=Regime(max_concurrency=max(context.concurrency, 1)),
        engine=context.engine,
    )


def _deciding(hardware: Hardware) -> list[str]:
    """On a CPU the widest vector set; elsewhere everything (a compute capability)."""
    if hardware.kind != "cpu":
        return list(hardware.isa)
    for level in VECTOR_LEVELS:
        found = sorted(item for item in hardware.isa if item.lower().startswith(level))
        if found:
            return found[:1]
    return []


def _name(component: str, title: str, patch: str) -> str:
    """Readable and stable: words of component and title, then six digits of the patch's digest."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{component} {title}".lower()).strip("-")[:48].strip("-")
    return f"{words or 'change'}-{hashlib.sha256(patch.encode()).hexdigest()[:6]}"
