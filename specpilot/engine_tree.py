"""`engine.toml`: how an engine tree is launched, what a worker may edit, its tunables, scopes and counters.

Reads only; an engine's code is never imported here. May import errors.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specpilot.errors import UsageError

MANIFEST = "engine.toml"
PROTOCOL = "sglang-native/1"
VARIANTS = ("stock", "ar", "reference", "final", "final-ar")
"""Variants that the loop needs; a tree without one of them is refused."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Launch(_Section):
    """How the server process starts. Placeholders in braces are filled by `EngineSpec.command`."""

    command: list[str] = Field(min_length=1)
    cwd: str = "."
    """Working directory, relative to the tree."""
    env: dict[str, str] = Field(default_factory=dict)


class Readiness(_Section):
    """When the server counts as started."""

    path: str = "/health"
    timeout_s: float = Field(180.0, gt=0)
    interval_s: float = Field(0.2, gt=0)


class Editable(_Section):
    """Glob patterns of the paths that a candidate's diff may touch; `**` crosses folders."""

    include: list[str]
    exclude: list[str] = Field(default_factory=list)


class TunableType(StrEnum):
    """Kinds of tunables."""

    int = "int"
    float = "float"
    bool = "bool"
    choice = "choice"


class Tunable(_Section):
    """One declared knob of the engine; its current value is in `tunables.toml`."""

    type: TunableType
    default: int | float | bool | str
    min: float | None = None
    max: float | None = None
    choices: list[int | float | bool | str] = Field(default_factory=list)
    log: bool = False
    """Search on a logarithmic scale."""
    max_from: str | None = None
    """Tighter upper bound known only at run time, as a remark for the reader (`block_size - 1`)."""
    component: str = "host"
    """Cost model component that it acts on."""
    doc: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Tunable:
        if self.type in (TunableType.int, TunableType.float) and (self.min is None or self.max is None):
            raise ValueError(f"a tunable of type {self.type} needs min and max")
        if self.type is TunableType.choice and not self.choices:
            raise ValueError("a tunable of type choice needs choices")
        if not self.allows(self.default):
            raise ValueError(f"default {self.default!r} is outside its own range")
        return self

    def allows(self, value: Any) -> bool:
        """True if `value` has the right type and lies in the declared range."""
        if self.type is TunableType.bool:
            return isinstance(value, bool)
        if self.type is TunableType.choice:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int if self.type is TunableType.int else (int, float)):
            return False
        assert self.min is not None and self.max is not None
        return self.min <= value <= self.max


class EngineSpec(BaseModel):
    """The whole of `engine.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    protocol: str
    description: str = ""
    max_len: int | None = Field(None, ge=2)
    """Longest prompt plus answer, in tokens, that the server takes as it is launched; null: the target alone limits it."""
    device: Literal["cpu", "gpu"] | None = None
    """What the engine computes on: `hardware: auto` then means this CPU, or the GPU. Null: the GPU where there is one."""
    launch: Launch
    variants: dict[str, list[str]]
    readiness: Readiness = Field(default_factory=Readiness)
    editable_paths: Editable = Field(alias="editable")
    tunables: dict[str, Tunable] = Field(default_factory=dict)
    scopes: dict[str, str] = Field(default_factory=dict)
    """Profile scope to cost model component."""
    counters: dict[str, str] = Field(default_factory=dict)
    """Counter name to its meaning."""

    def command(self, variant: str, values: dict[str, str]) -> list[str]:
        """The launch command of a variant, placeholders filled from `values` (`python`, `target`, `port`, ...).

        Raises `UsageError` for an unknown variant or a placeholder without a value.
        """
        if variant not in self.variants:
            raise UsageError(
                f"engine {self.name} has no variant {variant!r}", f"{MANIFEST} declares: {', '.join(self.variants)}."
            )
        return [self._fill(word, values) for word in [*self.launch.command, *self.variants[variant]]]

    def environment(self, values: dict[str, str]) -> dict[str, str]:
        """The launch environment, placeholders filled. Relative `PYTHONPATH` is relative to the working directory."""
        return {name: self._fill(text, values) for name, text in self.launch.env.items()}

    def editable(self, relative_path: str) -> bool:
        """True if a candidate may change this path (relative to the tree, `/` separated)."""
        path = PurePosixPath(relative_path)
        if path.is_absolute() or ".." in path.parts or ".git" in path.parts or relative_path == MANIFEST:
            return False
        return _matches(relative_path, self.editable_paths.include) and not _matches(
            relative_path, self.editable_paths.exclude
        )

    def tunables_text(self, values: Mapping[str, Any]) -> str:
        """Content of `tunables.toml`: the declared defaults, `values` over them.

        Raises `UsageError` for a name that is not declared or a value outside its range.
        """
        for name, value in values.items():
            if name not in self.tunables:
                near = difflib.get_close_matches(name, self.tunables, n=1, cutoff=0.0)
                guess = f"did you mean {near[0]!r}? " if near else ""
                raise UsageError(
                    f"engine {self.name} declares no tunable {name!r}", f"{guess}declared: {', '.join(self.tunables)}."
                )
            if not self.tunables[name].allows(value):
                raise UsageError(
                    f"tunable {name} = {value!r} is outside what {MANIFEST} allows", self.tunables[name].doc
                )
        merged = {name: values.get(name, tunable.default) for name, tunable in self.tunables.items()}
        lines = [f"{name} = {json.dumps(value)}" for name, value in merged.items()]
        return f"# Values of the tunables declared in {MANIFEST}.\n" + "\n".join(lines) + "\n"

    def _fill(self, word: str, values: dict[str, str]) -> str:
        def value_of(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise UsageError(
                    f"{MANIFEST} of engine {self.name} uses {{{match[1]}}}, which nobody fills",
                    f"known placeholders: {', '.join(sorted(values))}.",
                )
            return values[match[1]]

        return _PLACEHOLDER.sub(value_of, word)


def load_engine_spec(tree: Path) -> EngineSpec:
    """Read and check `tree/engine.toml`. Raises `UsageError` naming file and key."""
    path = tree / MANIFEST
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{tree} is not an engine tree: it has no {MANIFEST}", "see engines/slim/engine.toml."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "mend it at the place named.") from error
    try:
        spec = EngineSpec.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise UsageError(f"{path}: " + "; ".join(lines), "compare with engines/slim/engine.toml.") from error
    if spec.protocol != PROTOCOL:
        raise UsageError(f"{path}: protocol {spec.protocol!r} is not supported", f"this version speaks {PROTOCOL}.")
    missing = [name for name in VARIANTS if name not in spec.variants]
    if missing:
        raise UsageError(f"{path}: variants lacks {', '.join(missing)}", f"declare all of {', '.join(VARIANTS)}.")
    return spec


def _matches(path: str, patterns: list[str]) -> bool:
    return any(_match(path.split("/"), pattern.split("/")) for pattern in patterns)


def _match(path: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match(path[skip:], pattern[1:]) for skip in range(len(path) + 1)) and bool(path)
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _match(path[1:], pattern[1:])
