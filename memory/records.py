"""The store's own small records: validated going in, plain going out.

They carry no database session; `specpilot/loop` translates between these and `specpilot.contracts`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Status = Literal["verified", "refuted", "stale"]
Outcome = Literal["verified", "refuted"]
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
VECTOR_LEVELS = ("amx", "avx512", "avx2", "sve", "neon")
"""Vector instruction sets that change which kernel wins, widest first; matched by prefix (`avx512f` is `avx512`)."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Hardware(_Record):
    """What a mechanism needs (`Preconditions`) or a machine has (`RecallQuery`, `Effect`)."""

    kind: str = "cpu"
    """`cpu`, `cuda`, ..."""
    isa: list[str] = Field(default_factory=list)
    """Instruction sets or compute capability: `avx2`, `fma`, `sm_90`."""
    name: str = ""
    """The device's name, for people; never compared."""

    @property
    def hardware_class(self) -> str:
        """Machines of one class are expected to rank mechanisms alike: kind plus widest vector level."""
        have = sorted(item.lower() for item in self.isa)
        if self.kind == "cpu":
            for level in VECTOR_LEVELS:
                if any(item.startswith(level) for item in have):
                    return f"cpu/{level}"
            return "cpu/scalar"
        return "/".join([self.kind, *have])


class Regime(_Record):
    """Load under which a mechanism helps. None: no limit."""

    min_concurrency: int | None = Field(default=None, ge=1)
    max_concurrency: int | None = Field(default=None, ge=1)
    max_temperature: float | None = Field(default=None, ge=0)


class Preconditions(_Record):
    """Where a mechanism may be tried. An empty list, `any` or None accepts everything."""

    hardware: Hardware | None = None
    architectures: list[str] = Field(default_factory=list)
    """Target families: `llama`, `qwen3`."""
    drafters: list[str] = Field(default_factory=list)
    """Drafter methods: `dflash`, `ngram`."""
    regime: Regime = Field(default_factory=Regime)
    engine: str | None = None

    @field_validator("architectures", "drafters", mode="before")
    @classmethod
    def _any(cls, value: Any) -> Any:
        if value in (None, "any", ["any"]):
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("engine", mode="before")
    @classmethod
    def _any_engine(cls, value: Any) -> Any:
        return None if value == "any" else value


class Mechanism(_Record):
    """One way to make an engine faster: a patch against the engine's first commit (plus `requires`)."""

    name: str
    component: str
    """Scope of the cost model, for example `target.mlp`; or `*` for the whole round."""
    title: str
    hypothesis: str
    predicted_gain: float | None = Field(default=None, gt=0)
    """Expected end-to-end decode ratio, 1.0 = nothing."""
    requires: list[str] = Field(default_factory=list)
    """Mechanisms that must be in the engine before the patch applies."""
    preconditions: Preconditions = Field(default_factory=Preconditions)
    counters: list[str] = Field(default_factory=list)
    forbidden_counters: list[str] = Field(default_factory=list)
    patch: str
    """Unified diff, `git apply` form, relative to the engine tree."""
    notes: str = ""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a mechanism name: lower-case letters, digits, '-', '_', '.', at most 64"
            )
        return value

    @field_validator("patch")
    @classmethod
    def _patch(cls, value: str) -> str:
        if not re.search(r"^(diff --git |--- )", value, re.MULTILINE):
            raise ValueError("patch is not a unified diff: no line starts with 'diff --git' or '---'")
        return value

    @model_validator(mode="after")
    def _not_itself(self) -> Mechanism:
        if self.name in self.requires:
            raise ValueError(f"{self.name} requires itself")
        return self

    @property
    def patch_sha256(self) -> str:
        """Hex digest of the patch text as UTF-8."""
        return sha256_text(self.patch)

    @property
    def content_sha256(self) -> str:
        """Identity of this version: digest of every field, the patch included."""
        return sha256_json(as_json(self))


class Effect(_Record):
    """One measured and gated outcome of a mechanism on one deployment."""

    deployment: str
    deployment_fingerprint: str
    hardware: Hardware
    ratio: float = Field(gt=0)
    """Candidate over base decode tokens/s, geometric mean over `samples`."""
    low: float = Field(ge=0)
    high: float
    """Ends of the interval. `high` may be infinite when too few pairs were run; it is stored as the text "Infinity"."""
    accepted_length_before: float | None = None
    accepted_length_after: float | None = None
    predicted_gain: float | None = None
    predicted_ms: float | None = None
    realised_ms: float | None = None
    """Time of the component per decode round. Predicted: what the predicted gain, taken there, would leave of it, and no less than
    its bound. Realised: by the first profile of an engine that differs from the one profiled before by this change alone."""
    samples: list[float] = Field(default_factory=list)
    """Raw per-pair ratios."""
    gate: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    """Fingerprint of machine and software: processor, threads, torch, compiler."""
    run: str = ""
    round: int | None = None
    worker: str = ""
    commit: str = ""
    outcome: Outcome
    reason: str = ""
    """Why it was refuted: one of the run's closed list of reasons. Empty when verified."""
    at: datetime | None = None
    """When it was measured; None: now, filled in by the store."""

    @model_validator(mode="after")
    def _interval(self) -> Effect:
        if math.isnan(self.ratio) or math.isinf(self.ratio) or math.isnan(self.low) or math.isnan(self.high):
            raise ValueError(f"ratio {self.ratio} and its interval [{self.low}, {self.high}] must be numbers")
        if not self.low <= self.ratio <= self.high:
            raise ValueError(f"ratio {self.ratio} lies outside its interval [{self.low}, {self.high}]")
        if any(not (math.isfinite(sample) and sample > 0) for sample in self.samples):
            raise ValueError("samples must be positive finite ratios")
        if self.outcome == "refuted" and not self.reason:
            raise ValueError("a refuted effect needs a reason")
        return self

    @property
    def uid(self) -> str:
        """Content identity, so that loading or importing the same effect twice stores it once."""
        return sha256_json(as_json(self))


class StoredMechanism(_Record):
    """A mechanism as the store holds it, with its effects, newest first."""

    mechanism: Mechanism
    version: int
    status: Status
    origin: str
    """`seed`, `import` or a run id."""
    created: datetime
    effects: list[Effect] = Field(default_factory=list)


class RecallQuery(_Record):
    """What a run knows about itself when it asks the memory."""

    hardware: Hardware
    architecture: str
    drafter: str
    engine: str
    concurrency: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0)
    recoverable_ms: dict[str, float] = Field(default_factory=dict)
    """Cost model's ranking: component -> recoverable milliseconds per decode round."""
    present: list[str] = Field(default_factory=list)
    """Mechanisms that are already in the engine."""
    deployment_fingerprint: str = ""


class Recalled(_Record):
    """One answer of `recall`: a mechanism and, in plain words, why it is proposed here."""

    stored: StoredMechanism
    score: float
    """Expected end-to-end decode ratio: what this deployment measured, drawn towards the prediction; where it measured nothing, the
    lower end of others' intervals, or the discounted prediction."""
    why: str
    waits_for: list[str] = Field(default_factory=list)
    """Required mechanisms that are not in the engine yet."""
    unmet: list[str] = Field(default_factory=list)
    """Preconditions that do not hold here, in plain words. Always empty in what `recall` returns."""
    refuted_here: bool = False
    """On this kind of machine; see `memory.recall`."""
    refuted_on_this: str = ""
    """Why it was refuted on this very deployment and kind of machine, in words; empty if it was not."""

    @property
    def name(self) -> str:
        """Name of the mechanism."""
        return self.stored.mechanism.name


class Stats(_Record):
    """Overview of a store, and how often recall helped."""

    mechanisms: dict[str, int]
    """Status -> count, newest version of each name."""
    effects: dict[str, int]
    """Outcome -> count."""
    deployments: list[str]
    recalled: int
    tried: int
    accepted: int
    accepted_ratio: float | None
    """Geometric mean of the decode ratio over accepted recalls."""

    @property
    def helped(self) -> str:
        """One sentence: how often recall helped."""
        if not self.recalled:
            return "nothing was recalled yet"
        gain = "" if self.accepted_ratio is None else f", {self.accepted_ratio:.2f}x on average when accepted"
        counts = f"recalled {self.recalled}, tried {self.tried}, accepted {self.accepted}{gain}"
        return f"{counts} (over all runs, a mechanism once per run)"


def as_json(record: BaseModel) -> dict[str, Any]:
    """Plain JSON values of `record`; infinite numbers as text, which `model_validate` reads back."""
    return json.loads(record.model_dump_json())


def sha256_text(text: str) -> str:
    """Hex SHA-256 of `text` as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON form (sorted keys, no spaces, no NaN) of `value`."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False))
