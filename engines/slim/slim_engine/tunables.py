"""Values of the declared tunables. `engine.toml` declares them, `tunables.toml` sets them; both lie at the root of the tree."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from slim_engine.errors import TunableError

TREE = Path(__file__).resolve().parent.parent


class Tunables(dict[str, Any]):
    """Name -> value, every declared tunable present and inside its range."""


def load_tunables(tree: Path = TREE) -> Tunables:
    """Reads both files of `tree`. Values that tunables.toml leaves out take their default.

    Raises TunableError for an unknown name, a wrong type or a value out of range.
    """
    declared = tomllib.loads((tree / "engine.toml").read_text())["tunables"]
    path = tree / "tunables.toml"
    try:
        given = tomllib.loads(path.read_text()) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise TunableError(f"{path} is not valid TOML: {error}") from error
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise TunableError(
            f"{path}: {', '.join(unknown)} not declared in engine.toml (declared: {', '.join(sorted(declared))})"
        )
    values = Tunables()
    for name, rule in declared.items():
        value = given.get(name, rule["default"])
        _check(path, name, value, rule)
        values[name] = value
    return values


def _check(path: Path, name: str, value: Any, rule: dict[str, Any]) -> None:
    kind = rule["type"]
    if kind == "choice":
        fine, want = value in rule["choices"], f"one of {rule['choices']}"
    elif kind == "bool":
        fine, want = isinstance(value, bool), "true or false"
    else:
        types: tuple[type, ...] = (int,) if kind == "int" else (int, float)
        fine = isinstance(value, types) and not isinstance(value, bool) and rule["min"] <= value <= rule["max"]
        want = f"{kind} from {rule['min']} to {rule['max']}"
    if not fine:
        raise TunableError(f"{path}: {name} = {value!r}, must be {want}")
