"""The declared tunables of an engine tree: ranges from engine.toml, current values in tunables.toml.

Reads both files and writes the second, keeping its comments. Knows nothing of search.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import AgentError, DoesNotApplyError

Value = bool | int | float | str
LOG_SPAN = 16.0
"""A positive range whose ends differ by this factor or more is searched on a logarithmic scale."""
DRAFTERS = ("dflash", "ngram")
"""A tunable whose component is one of these concerns that drafter alone."""


@dataclass(frozen=True)
class Tunable:
    """One knob: `int` and `float` have low and high, `choice` and `bool` have choices."""

    name: str
    kind: str
    default: Value
    component: str
    doc: str = ""
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()

    @property
    def log(self) -> bool:
        """Whether steps should be relative rather than absolute."""
        return self.kind in ("int", "float") and self.low > 0 and self.high / self.low >= LOG_SPAN

    @property
    def size(self) -> float:
        """Number of values; infinite for a float."""
        if self.kind == "float":
            return math.inf if self.high > self.low else 1
        return len(self.choices) if self.choices else int(self.high) - int(self.low) + 1


@dataclass(frozen=True)
class Space:
    """The knobs of one tree and where they stand."""

    tunables: tuple[Tunable, ...]
    current: dict[str, Value]
    """Value of every tunable in `tunables`, clipped to its effective range."""

    @property
    def size(self) -> float:
        """Number of settings."""
        return math.prod(tunable.size for tunable in self.tunables)


@dataclass(frozen=True)
class TunableEdit:
    """Sets some tunables in a worktree's tunables.toml."""

    values: dict[str, Value]

    def apply(self, worktree: Path) -> list[str]:
        """See `agents.base.Edit`. Raises DoesNotApplyError when the file cannot take the values."""
        path = worktree / "tunables.toml"
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            new = set_values(text, self.values)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise DoesNotApplyError(f"cannot edit {path.name}: {error}") from error
        path.write_text(new, encoding="utf-8")
        return ["tunables.toml"]


def load_space(tree: Path, *, drafter: str, facts: dict[str, int] | None = None) -> Space:
    """The tunables of `tree` that matter with `drafter`.

    `facts` resolves `max_from` ("block_size - 1"). A knob left with one value is dropped. Raises AgentError naming
    the tunable whose declaration is wrong.
    """
    declared, given = _toml(tree / "engine.toml").get("tunables", {}), {}
    if (tree / "tunables.toml").exists():
        given = _toml(tree / "tunables.toml")
    tunables, current = [], {}
    for name, rule in declared.items():
        tunable = _tunable(name, rule, facts or {})
        if tunable.size <= 1 or (tunable.component in DRAFTERS and tunable.component != drafter):
            continue
        tunables.append(tunable)
        current[name] = _current(tunable, given.get(name, tunable.default))
    return Space(tuple(tunables), current)


def set_values(text: str, values: dict[str, Value]) -> str:
    """`text` (TOML, top-level keys) with `values` set; comments and order kept, new keys before the first table."""
    lines = text.splitlines()
    first_table = next((i for i, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    for name, value in values.items():
        key = re.compile(rf"\s*(?:{re.escape(name)}|\"{re.escape(name)}\")\s*=")
        new = f"{name} = {_literal(value)}"
        found = next((i for i in range(first_table) if key.match(lines[i])), None)
        if found is None:
            lines.insert(first_table, new)
            first_table += 1
        else:
            comment = re.search(r"\s+#[^\"']*$", lines[found])
            lines[found] = new + (comment.group() if comment else "")
    result = "\n".join(lines) + "\n"
    parsed = tomllib.loads(result)
    expected = {**tomllib.loads(text), **values}
    if parsed != expected:
        raise DoesNotApplyError(
            "tunables.toml has a form that cannot be edited line by line", "one 'name = value' per line"
        )
    return result


def _tunable(name: str, rule: dict[str, Any], facts: dict[str, int]) -> Tunable:
    try:
        kind = rule["type"]
        common = {"name": name, "kind": kind, "default": rule["default"]}
        common |= {"component": rule.get("component", "*"), "doc": rule.get("doc", "")}
        if kind == "bool":
            return Tunable(**common, choices=(False, True))
        if kind == "choice":
            return Tunable(**common, choices=tuple(rule["choices"]))
        if kind in ("int", "float"):
            high = min(
                rule["max"], _resolve(rule["max_from"], facts, rule["max"]) if "max_from" in rule else rule["max"]
            )
            return Tunable(**common, low=rule["min"], high=max(high, rule["min"]))
    except KeyError as error:
        raise AgentError(f"engine.toml: tunable {name} has no {error}") from error
    raise AgentError(f"engine.toml: tunable {name} has type {kind!r}", "int, float, bool or choice")


def _current(tunable: Tunable, value: Any) -> Value:
    """`value` as the engine would take it: clipped to the effective range. Raises AgentError for another kind."""
    if tunable.choices:
        if value in tunable.choices and isinstance(value, bool) == (tunable.kind == "bool"):
            return value
        raise AgentError(f"tunables.toml: {tunable.name} = {value!r}", f"one of {list(tunable.choices)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AgentError(
            f"tunables.toml: {tunable.name} = {value!r}", f"a number from {tunable.low:g} to {tunable.high:g}"
        )
    clipped = min(max(value, tunable.low), tunable.high)
    return int(clipped) if tunable.kind == "int" else float(clipped)


def _resolve(expression: str, facts: dict[str, int], otherwise: float) -> float:
    """`block_size`, `block_size - 1`, `block_size + 2`; `otherwise` when the fact is unknown."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:([+-])\s*(\d+))?\s*", expression)
    if match is None:
        raise AgentError(f"engine.toml: cannot read max_from {expression!r}", "a fact, plus or minus a number")
    name, sign, number = match.groups()
    if name not in facts:
        return otherwise
    return facts[name] + (int(number) if sign == "+" else -int(number) if sign else 0)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise AgentError(f"cannot read {path}: {error}") from error


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
