"""Mechanisms that ship with SpecPilot: seeds/<name>/{mechanism.yaml, change.patch, evidence.json}.

A seed is loaded when a store is opened, once per content; a user's own version or effect is never replaced.
`evidence.json` is a list of effects measured by SpecPilot's own loop; without it the seed counts as unproven.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from .errors import SeedError
from .records import Effect, Mechanism, StoredMechanism, as_json

SEED_FOLDER = Path(__file__).parent / "seeds"


class Seed(NamedTuple):
    """One shipped mechanism and its recorded effects, oldest first."""

    mechanism: Mechanism
    effects: list[Effect]


def read_seeds(folder: Path) -> list[Seed]:
    """Every seed under `folder`, by name; none when the folder is not there. Raises SeedError naming the file."""
    if not folder.is_dir():
        return []
    return [read_seed(path.parent) for path in sorted(folder.glob("*/mechanism.yaml"))]


def read_seed(folder: Path) -> Seed:
    """The seed in `folder`. Raises SeedError."""
    fields = _yaml(folder / "mechanism.yaml")
    name = fields.get("name")
    if name != folder.name:
        raise SeedError(
            f"{folder / 'mechanism.yaml'}: name is {name!r}", f"it must be the folder's name, {folder.name!r}"
        )
    patch_path = folder / str(fields.get("patch", "change.patch"))
    try:
        fields["patch"] = patch_path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SeedError(f"cannot read {patch_path}: {error}") from error
    for key in ("requires", "counters", "forbidden_counters", "preconditions", "notes"):
        if fields.get(key, "") is None:
            del fields[key]
    try:
        mechanism = Mechanism.model_validate(fields)
    except ValidationError as error:
        raise SeedError(f"{folder / 'mechanism.yaml'}: {_first(error)}", "see docs/memory.md for the schema") from error
    return Seed(mechanism, _effects(folder / "evidence.json"))


def write_evidence(stored: StoredMechanism, folder: Path) -> Path:
    """Write the effects of `stored` as `folder`/evidence.json, oldest first: how a local finding becomes a seed."""
    path = folder / "evidence.json"
    body = [as_json(effect) for effect in reversed(stored.effects)]
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return path


def _effects(path: Path) -> list[Effect]:
    if not path.exists():
        return []
    try:
        body = json.loads(path.read_text())
        if not isinstance(body, list):
            raise SeedError(f"{path}: not a list of effects")
        effects = [Effect.model_validate(item) for item in body]
    except ValidationError as error:
        raise SeedError(f"{path}: {_first(error)}") from error
    except (OSError, ValueError) as error:
        raise SeedError(f"cannot read {path}: {error}") from error
    if any(effect.at is None for effect in effects):
        raise SeedError(f"{path}: an effect has no time", "every effect needs 'at', an ISO 8601 instant")
    return effects


def _yaml(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SeedError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise SeedError(f"{path}: not a mapping")
    return fields


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
