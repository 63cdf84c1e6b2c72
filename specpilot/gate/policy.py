"""From a deployment's `gate:` section to the gate's limits. Reads attributes only."""

from __future__ import annotations

from typing import Any

from specpilot.gate.records import GatePolicy


def policy_of(settings: Any = None) -> GatePolicy:
    """The policy with every field that `settings` also has (same name, not None); the rest keep their defaults.

    `settings` may be a GatePolicy, a deployment's gate section, a mapping, or None.
    """
    if settings is None:
        return GatePolicy()
    if isinstance(settings, GatePolicy):
        return settings
    found = {}
    for name in GatePolicy.model_fields:
        value = settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
        if value is not None:
            found[name] = value
    return GatePolicy(**found)
