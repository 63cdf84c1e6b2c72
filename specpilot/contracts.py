"""What passes between the rooms of the control plane: plain, frozen, JSON-serialisable records.

Every record here is written to the journal as JSON and read back by `specpilot resume`, the report and
the export. This module imports nothing of ours and does nothing; it may not grow behaviour beyond
arithmetic on its own fields.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Base of all contracts: immutable, unknown fields refused, JSON round trip exact."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class AttemptState(StrEnum):
    """Where one attempt stands. `rejected` carries a `Reason`."""

    planned = "planned"
    working = "working"
    submitted = "submitted"
    measured = "measured"
    gated = "gated"
    accepted = "accepted"
    rejected = "rejected"
    merged = "merged"
    superseded = "superseded"


class Reason(StrEnum):
    """Why an attempt was rejected: a closed list, printed and stored."""

    does_not_apply = "does-not-apply"
    empty_diff = "empty-diff"
    outside_editable = "diff-outside-editable"
    start_failed = "start-failed"
    wrong_identity = "wrong-identity"
    crashed = "crashed"
    timed_out = "timed-out"
    resource_limit = "resource-limit"
    missing_responses = "missing-responses"
    accounting_mismatch = "accounting-mismatch"
    length_mismatch = "length-mismatch"
    stop_mismatch = "stop-mismatch"
    token_mismatch = "token-mismatch"
    near_tie_rate = "near-tie-rate"
    distribution_mismatch = "distribution-mismatch"
    replayed_answers = "replayed-answers"
    not_engaged = "not-engaged"
    fell_back = "fell-back"
    impossible_time = "impossible-time"
    speculation_off = "speculation-off"
    wrong_weights = "wrong-weights"
    no_gain = "no-gain"
    superseded_by_sum = "no-gain-in-sum"
    withdrawn = "withdrawn"


class StopReason(StrEnum):
    """Why a run ended: a closed list, printed and stored. The first three are complete runs (exit code 0): a spent budget is an end, too."""

    rounds_done = "rounds-done"
    no_headroom = "no-headroom"
    budget_wall_clock = "budget-wall-clock"
    interrupted = "interrupted"
    infrastructure = "infrastructure"
    gate_unsound = "gate-unsound"

    @property
    def complete(self) -> bool:
        """Nothing is owed, so there is nothing to resume. Of a spent budget the closing session had its share in reserve."""
        return self not in (StopReason.interrupted, StopReason.infrastructure, StopReason.gate_unsound)


class Claim(Record):
    """What a worker says about its candidate. The gate proves or refutes it.

    `counters` are names in the engine's `/server_info` counters that must grow during the timed run
    (engagement proof). `forbidden_counters` must stay equal (a fallback counter, for instance).
    """

    component: str
    hypothesis: str
    predicted_gain: float | None = None
    counters: list[str] = Field(default_factory=list)
    forbidden_counters: list[str] = Field(default_factory=list)
    mechanism: str | None = None
    """Name of the memory mechanism this candidate replays, if it does."""


class Candidate(Record):
    """A commit on a branch of the run's repository, plus its claim."""

    attempt_id: str
    worker: str
    base_commit: str
    commit: str
    branch: str
    claim: Claim


class Generation(Record):
    """One answered request, timed by the client. Times are seconds on the evaluator's monotonic clock."""

    prompt_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    submitted_s: float
    first_s: float
    """Arrival of the first chunk with a token."""
    last_s: float
    """Arrival of the end of the response."""
    first_chunk_tokens: int
    """Tokens in the first chunk; the decode rate counts the others."""
    claimed_tokens: int
    finish_reason: str
    rounds: int | None = None
    """Decode rounds as the engine reports them (`spec_verify_ct`)."""

    @property
    def decode_s(self) -> float:
        """Seconds from the first chunk to the end."""
        return self.last_s - self.first_s

    @property
    def decoded(self) -> int:
        """Tokens that arrived after the first chunk."""
        return len(self.output_ids) - self.first_chunk_tokens


class Leg(Record):
    """Consecutive requests to one engine process at one concurrency."""

    side: str
    """`base` or `candidate`."""
    commit: str
    variant: str
    concurrency: int
    generations: list[Generation]
    wall_s: float
    counters: dict[str, float]
    """Growth of each engine counter over the leg."""


class SideSummary(Record):
    """One engine in one comparison. Rates are tokens per second over all its legs."""

    commit: str
    variant: str
    decode_tokens_per_s: float
    end_to_end_tokens_per_s: float
    ttft_s: float
    accepted_length: float | None
    """Committed tokens per decode round, bonus included; None when the engine reports no rounds."""
    target_forwards_per_token: float | None
    startup_s: float
    tokens: int


class Comparison(Record):
    """Candidate against base, interleaved in one session on the same prompts.

    `ratio` is candidate over base of decode tokens/s (geometric mean over pairs); [`low`, `high`] is
    valid at any stopping time at level `alpha`. `detectable` is the smallest ratio the pair budget can show.
    """

    base: SideSummary
    candidate: SideSummary
    ratio: float
    low: float
    high: float
    end_to_end_ratio: float
    end_to_end_low: float
    end_to_end_high: float
    alpha: float
    pairs: list[float]
    """Per-pair candidate/base ratio of decode tokens per second."""
    detectable: float
    decision: str
    """`gain`, `loss`, or `null` (interval straddles 1 when the budget ended)."""
    seconds: float
    machine: dict[str, Any] = Field(default_factory=dict)


class Calibration(Record):
    """What counts as a near-tie for this deployment, from the reference against itself in another batch shape.

    `epsilon` is a gap in log-probability (nats) at the same position. `near_tie_rate_limit` is the largest
    share of positions that may be near-ties rather than the argmax.
    """

    epsilon: float
    near_tie_rate_limit: float
    positions: int
    near_ties: int
    max_gap: float
    gap_quantiles: dict[str, float]
    method: str
    baseline_note: str = ""


class Check(Record):
    """One line of gate evidence."""

    name: str
    passed: bool
    detail: str


class Verdict(Record):
    """The gate's answer on one candidate."""

    passed: bool
    reason: Reason | None
    detail: str
    checks: list[Check]
    positions: int = 0
    exact: int = 0
    near_ties: int = 0
    violations: int = 0
    max_gap: float = 0.0


class Gap(Record):
    """One row of the cost model's table: a component of the decode round, in milliseconds per round."""

    component: str
    measured_ms: float
    bound_ms: float
    ratio: float
    """bound over measured: 1.0 means at the roof; above 1.0 the model is wrong and says so."""
    share: float
    recoverable_ms: float
    expected_gain: float
    """End-to-end decode ratio if this component alone reached its bound."""
    limit: str
    """`bandwidth`, `compute` or `launch`."""


class GapTable(Record):
    """The roofline view of one engine at one regime."""

    commit: str
    rows: list[Gap]
    round_ms: float
    bound_ms: float
    accepted_length: float
    tokens_per_s: float
    tokens_per_s_at_bound: float
    share_of_bound: float
    warnings: list[str] = Field(default_factory=list)
    hardware: dict[str, Any] = Field(default_factory=dict)

    @property
    def profiled_ms(self) -> float:
        """Milliseconds of the profiled round, tracing on: the sum of its components. `round_ms` is timed with tracing off."""
        return sum(row.measured_ms for row in self.rows)
