"""What the closing summary and the HTML report are made from: one record that the loop fills from the journal.

Fields that other records already have keep their names, and unknown fields are ignored, so that most parts are
`X.model_validate(other.model_dump())`. Everything but the identity is optional: a run that ended early has a report, too.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from specpilot.contracts import Calibration, Comparison, GapTable, Verdict
from specpilot.report.state import both
from specpilot.words import count

NOISY_SD = 0.10
"""Standard deviation of one A/A pair's log-ratio above which a session is called noisy."""
NOISY_SHARE = 0.5
"""Half of an interval, over the effect, both in logarithms: above this the interval says little about the size."""


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

    @property
    def names(self) -> str:
        """Attempt and mechanism together, as in status and journal."""
        return both(self.attempt_id, self.name)


class Again(Part):
    """One merged change, re-tested by leaving it out of the final engine (`loop.records.LeftOut`)."""

    attempt_id: str = ""
    name: str
    outcome: str
    detail: str = ""
    gain: float | None = None
    """The final engine over the one without it."""
    low: float | None = None
    high: float | None = None

    @property
    def names(self) -> str:
        """Attempt and mechanism together."""
        return both(self.attempt_id, self.name)

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
    null_pairs: list[float] = Field(default_factory=list)
    """Ratios of the unchanged engine over itself, one per pair."""
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
    elapsed_s: float | None = None
    limit_s: float | None = None
    rounds: int | None = None
    hardware: dict[str, Any] = Field(default_factory=dict)
    """`costmodel.Hardware.as_dict()`."""
    software: dict[str, str] = Field(default_factory=dict)
    """Name to version."""
    figures: list[Figure] = Field(default_factory=list)
    closed: bool = True
    """Whether `figures` and `ratios` are the closing session's; otherwise those of the first look at `ar` and `stock`."""
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
    def noise(self) -> str:
        """What a reader must know of a noisy session, with the figures that it rests on; empty for a quiet one.

        Noisy: one A/A pair's log-ratio has a standard deviation above `NOISY_SD`, or the interval of final over stock is
        wider, to one side, than both that and `NOISY_SHARE` of the effect (in logarithms).
        """
        told = []
        logs = [math.log(pair) for pair in (self.self_test.null_pairs if self.self_test else []) if pair > 0]
        sd = statistics.stdev(logs) if len(logs) > 1 else 0.0
        if sd > NOISY_SD:
            told.append(
                f"the unchanged engine against itself wandered by {math.expm1(sd):.0%} from pair to pair "
                f"(one standard deviation of {count(len(logs), 'pair')})"
            )
        total = self.ratio("final", "stock")
        if total is not None and _wide(total):
            told.append(
                f"final over stock, {total.ratio:.2f}x, is only known to lie between {total.low:.2f} and {total.high:.2f}"
            )
        return "; ".join(told) + ": run it again on a quieter machine for closer figures" if told else ""

    @property
    def closing_round_ms(self) -> float | None:
        """Milliseconds of the final engine's decode round in the closing session: accepted length over decode rate.

        None where the load is several requests at a time (a round is shared then) or nothing was measured.
        """
        final, table = self.figure("final"), self.gaps_after
        requests = ((table.hardware if table else {}).get("regime") or {}).get("requests", 1)
        if not self.closed or requests != 1 or final is None or not final.accepted_length:
            return None
        return 1e3 * final.accepted_length / final.decode_tokens_per_s

    @property
    def rounds_told(self) -> list[str]:
        """Which round times there are of one engine, and why they differ; one sentence each, none without a profile."""
        before, after = self.gaps_before, self.gaps_after
        tables = [(name, table) for name, table in (("stock", before), ("final", after)) if table and table.round_ms]
        if not tables:
            return []
        timed = " and ".join(f"{table.round_ms:.1f} ms for {name}" for name, table in tables)
        traced = " and ".join(f"{table.profiled_ms:.1f} ms for {name}" for name, table in tables)
        told = [
            f"Timed, tracing off: {timed}. The share of the bound is of this time.",
            f"Profiled, tracing on: {traced}, the sum of the components. It differs because writing the trace takes time "
            "and each component is the median over rounds; compare components by their shares.",
        ]
        if self.closing_round_ms is not None:
            told.append(
                f"Timed in the closing session: {self.closing_round_ms:.1f} ms for final (accepted length over decode rate). "
                "It differs because other prompts were asked at another moment: medians over hidden prompts there, "
                "a few tuning prompts here."
            )
        return told

    @property
    def roofs(self) -> list[str]:
        """Which roof each share of the bound refers to, one sentence each."""
        after, before = self.gaps_after, self.gaps_before
        began = _roof(before.hardware if before else self.hardware)
        measured = "read from a datasheet" if self.hardware.get("source") == "datasheet" else "measured"
        if after is None or _roof(after.hardware) == began:
            return [f"The roof, {began}, was {measured} once; every share of a bound refers to it."] if began else []
        best = (self.hardware.get("best") or {}).get("read_gbs")
        burst = f" (its best single pass read {best:.1f} GB/s, and bounds nothing here)" if best else ""
        return [
            f"The roof drawn, {_roof(after.hardware)}, was {measured} just before and after the final engine's profile: the "
            "share of the bound at the top, the upright marks and the last table refer to it.",
            f"The roof when the run began was {began}{burst}: the rounds' own gap tables, and the stock engine's bound, "
            "refer to that one.",
        ]

    @property
    def share_of_bound(self) -> float | None:
        """Share of the attainable speed that the final engine reaches, by the cost model."""
        return None if self.gaps_after is None else self.gaps_after.share_of_bound


def _wide(total: Ratio) -> bool:
    if not 0 < total.low <= total.high < math.inf:
        return True
    return math.log(total.high / total.low) / 2 > max(NOISY_SD, NOISY_SHARE * abs(math.log(total.ratio)))


def _roof(hardware: dict[str, Any]) -> str:
    """Bandwidth and peak of a machine in words; empty where they are not known."""
    peaks = hardware.get("peak_gflops") or {}
    kind = "bfloat16" if hardware.get("kind") == "gpu" and "bfloat16" in peaks else "float32"
    if not hardware.get("bandwidth_gbs") or kind not in peaks:
        return ""
    return f"{hardware['bandwidth_gbs']:.1f} GB/s and {peaks[kind]:.0f} GFLOP/s"
