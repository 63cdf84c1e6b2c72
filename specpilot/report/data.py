"""What the closing summary and the HTML report are made from: one record that the loop fills from the journal.

Fields that other records already have keep their names, and unknown fields are ignored, so that most parts are
`X.model_validate(other.model_dump())`. Everything but the identity is optional: a run that ended early has a report, too.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from specpilot.contracts import Calibration, Comparison, GapTable, Verdict


class Part(BaseModel):
    """Base of the report's records: immutable, foreign fields ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Figure(Part):
    """One of the four named engines in the closing session (`evaluation.baselines.VariantFigures`)."""

    name: str
    """`ar`, `stock`, `final` or `final-ar`."""
    commit: str = ""
    variant: str = ""
    decode_tokens_per_s: float
    end_to_end_tokens_per_s: float | None = None
    ttft_s: float | None = None
    accepted_length: float | None = None
    target_forwards_per_token: float | None = None
    startup_s: float | None = None
    tokens: int | None = None


class Ratio(Part):
    """`of` over `over`, paired by prompt in one session (`evaluation.baselines.RatioFigure`)."""

    of: str
    over: str
    ratio: float
    low: float
    high: float
    median: float | None = None
    end_to_end_ratio: float | None = None
    pairs: list[float] = Field(default_factory=list)


class Step(Part):
    """One accepted change on the way from stock to final, in the order of merging (`loop.records.Merged`)."""

    attempt_id: str
    mechanism: str | None = None
    component: str = ""
    gain: float
    """Measured ratio of this step over the engine before it."""
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        """What to call it."""
        return self.mechanism or self.component or self.attempt_id


class Again(Part):
    """One merged change, re-tested by leaving it out of the final engine (`loop.records.LeftOut`)."""

    name: str
    outcome: str
    detail: str = ""
    gain: float | None = None
    """The final engine over the one without it."""
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        """The outcome as a reader says it."""
        return {
            "still-helps": "still helps",
            "no-visible-effect": "no visible effect any more",
            "hurts": "hurts" if self.detail else "hurts: taken out",
        }.get(self.outcome, "not told") + (f" ({self.detail})" if self.detail else "")


class Fate(Part):
    """One attempt and what became of it."""

    id: str
    round: int
    worker: str
    component: str
    state: str
    reason: str | None = None
    detail: str = ""
    mechanism: str | None = None
    hypothesis: str = ""
    predicted_gain: float | None = None
    commit: str = ""
    comparison: Comparison | None = None
    verdict: Verdict | None = None


class Cheat(Part):
    """One planted cheat and the gate's answer (`gate.records.CheatOutcome`)."""

    cheat: str
    stage: str = ""
    expected: list[str] = Field(default_factory=list)
    got: str | None = None
    caught: bool
    evidence: str = ""
    seconds: float | None = None


class SelfTest(Part):
    """The gate's test of itself before round 1 (`gate.records.SelfTestResult`)."""

    passed: bool
    outcomes: list[Cheat] = Field(default_factory=list)
    honest: list[Cheat] = Field(default_factory=list)
    null_ratio: float | None = None
    null_low: float | None = None
    null_high: float | None = None
    null_decision: str = ""
    seconds: float | None = None


class MemoryUse(Part):
    """What memory gave to this run and what it learned from it."""

    recalled: int = 0
    """Mechanisms that recall proposed and that became attempts; each once, whatever rounds tried it."""
    tried: int = 0
    accepted: int = 0
    merged: int = 0
    gain: float | None = None
    """Product of the merged recalled steps' measured gains."""
    mechanisms: list[str] = Field(default_factory=list)
    """Names of those merged."""
    learned: int = 0
    """Effects written, refuted ones included."""
    note: str = ""


class Moment(Part):
    """One line of the journal of events."""

    at: float
    """Seconds since the epoch."""
    kind: str
    text: str


class Command(Part):
    """A command that reproduces or uses the result."""

    what: str
    command: str


class ReportData(Part):
    """Everything that the closing summary and the HTML report show."""

    deployment: str
    run_id: str
    version: str = ""
    """SpecPilot's version."""
    created: str = ""
    """Start of the run, ISO 8601."""
    finished: str = ""
    summary: str = ""
    """One or two sentences on the deployment: target, drafter, load."""
    stop_reason: str = ""
    stop_detail: str = ""
    elapsed_s: float | None = None
    limit_s: float | None = None
    rounds: int | None = None
    hardware: dict[str, Any] = Field(default_factory=dict)
    """`costmodel.Hardware.as_dict()`."""
    software: dict[str, str] = Field(default_factory=dict)
    """Name to version."""
    figures: list[Figure] = Field(default_factory=list)
    ratios: list[Ratio] = Field(default_factory=list)
    steps: list[Step] = Field(default_factory=list)
    left_out: list[Again] = Field(default_factory=list)
    attempts: list[Fate] = Field(default_factory=list)
    gaps_before: GapTable | None = None
    gaps_after: GapTable | None = None
    calibration: Calibration | None = None
    self_test: SelfTest | None = None
    memory: MemoryUse = Field(default_factory=MemoryUse)
    trials: int = 0
    """Settings that the search worker tried."""
    events: list[Moment] = Field(default_factory=list)
    commands: list[Command] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    """Caveats for the reader, shown at the top."""
    run_dir: str = ""

    def figure(self, name: str) -> Figure | None:
        """The figures of `ar`, `stock`, `final` or `final-ar`."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def ratio(self, of: str, over: str) -> Ratio | None:
        """A measured ratio."""
        return next((ratio for ratio in self.ratios if (ratio.of, ratio.over) == (of, over)), None)

    @property
    def explained(self) -> float:
        """Product of the merged steps' measured gains."""
        product = 1.0
        for step in self.steps:
            product *= step.gain
        return product

    @property
    def unexplained(self) -> float | None:
        """What the closing session shows beyond (or below) that product: measured total over product of steps."""
        total = self.ratio("final", "stock")
        return None if total is None else total.ratio / self.explained

    @property
    def share_of_bound(self) -> float | None:
        """Share of the attainable speed that the final engine reaches, by the cost model."""
        return None if self.gaps_after is None else self.gaps_after.share_of_bound
