"""Records that only the gate writes: limits, hidden pass, forcing tallies, diff report, self-test.

They join `specpilot.contracts` in the journal, so they follow the same rules: frozen, JSON-serialisable,
no behaviour beyond arithmetic on their own fields. This module starts nothing and reads no file.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from specpilot.contracts import Check, Generation, Leg, Reason, Record
from specpilot.deployment import GateSettings

_SET = GateSettings()


class GatePolicy(Record):
    """Every limit the gate applies, in one place; the one a check held a candidate to stands in its line of the verdict.

    Defaults are meant for a BF16 checkpoint served with float32 accumulation. Limits that a deployment sets in its `gate:`
    section have their defaults there (`GateSettings`); the others hold for every run.
    """

    epsilon_floor: float = _SET.epsilon_floor
    """Nats. Smallest near-tie gap ever used: below it, summation order alone flips an argmax."""
    epsilon_safety: float = 2.0
    """The 99.9 % quantile of the reference's own gaps is multiplied by this."""
    near_tie_rate_floor: float = _SET.near_tie_rate_floor
    """Share of positions that may be near-ties even when the reference against itself shows none."""
    near_tie_confidence: float = 0.999
    """Confidence of the binomial bounds, both when the limit is set and when a candidate is held to it."""
    time_slack: float = 0.10
    """A decode round may come out this share faster than the floor before it is called impossible."""
    engagement_share: float = 0.25
    """A claimed counter must grow at least this often per decode round."""
    startup_factor: float = 5.0
    """A start-up longer than this multiple of the base's ..."""
    startup_slack_s: float = 120.0
    """... plus this many seconds is refused: the work was moved there."""
    replay_speedup: float = 3.0
    """A repeated prompt answered this many times faster per round than any fresh one is a stored answer."""
    replay_rounds: float = 0.7
    """A repeated prompt that needs less than this share of the rounds of its first time is one, too."""
    overlap_share: float = 0.3
    """Share of the offered concurrency that must really be in flight in a leg at concurrency above 1."""
    speculation_off_length: float = 1.05
    """Accepted length at or below this means that nothing was speculated."""
    distribution_alpha: float = 1e-4
    """Level of the test on sampled tokens (temperature above 0)."""
    distribution_top: int = 64
    """Tokens of the reference's distribution that are read per position in that test."""
    max_binary_bytes: int = 65536
    """Largest binary file a candidate may add."""
    max_text_bytes: int = 1_048_576
    """Largest text file a candidate may add: stored answers are big, kernels are not."""
    hidden_concurrencies: list[int] = Field(default_factory=lambda: [*_SET.hidden_concurrencies])
    hidden_prompts: int = _SET.hidden_prompts
    """Hidden prompts per concurrency level."""
    hidden_tokens: int = _SET.hidden_tokens
    natural_stop_prompts: int = _SET.natural_stop_prompts
    natural_tokens: int = _SET.natural_tokens
    sampled_prompts: int = 8
    stop_after_violations: int = 3
    """Forcing stops early once this many violations are on record; what was scored until then is the evidence."""


class TimeFloor(Record):
    """Fastest physically possible decode round, from the cost model.

    `round_s` must be the time to read the target's weights once *in the most compact lossless format*
    at the measured bandwidth (or to do one row's arithmetic at the peak, if that is longer): a candidate is then
    never called impossible for a better weight format.
    """

    round_s: float
    source: str = ""


class ReplayProbe(Record):
    """One hidden prompt, near copies of it and the prompt again, interleaved, caches flushed before each."""

    fresh: list[Generation]
    repeated: list[Generation]


class HiddenPass(Record):
    """What a candidate answered to prompts that no worker has seen."""

    legs: list[Leg]
    """Fixed length, EOS ignored, one leg per concurrency level."""
    natural: Leg | None = None
    """EOS respected."""
    sampled: Leg | None = None
    """Temperature of the deployment, when above 0."""
    temperature: float = 0.0
    replay: ReplayProbe | None = None
    requested_tokens: int
    natural_limit: int = 0
    eos_token_ids: list[int] = Field(default_factory=list)
    vocab_size: int | None = None
    """Tokens that the target knows; None where its config does not say."""
    block_size: int = 1
    """Largest number of tokens one decode round can commit, as served (1 without a drafter)."""
    startup_s: float = 0.0
    server_info: dict[str, Any] = Field(default_factory=dict)


class ForcedSequence(Record):
    """Tally of one answer forced through the reference."""

    prompt_id: str
    positions: int
    exact: int
    near_ties: int
    violations: int
    max_gap: float
    """Largest finite gap in nats, near-tie or violation."""
    first_violation: int | None = None
    """Index into the output, 0-based."""
    first_violation_note: str = ""
    near_tie_gaps: list[float] = Field(default_factory=list)


class ForcingTally(Record):
    """Sum over sequences. `skipped` counts sequences not scored because enough violations were found."""

    sequences: list[ForcedSequence]
    positions: int
    exact: int
    near_ties: int
    violations: int
    max_gap: float
    skipped: int = 0


class Change(Record):
    """One path of a candidate's diff, as git records it."""

    path: str
    status: str
    """A, M, D or T."""
    mode: str
    """Mode after the change: 100644, 100755, 120000 (symbolic link), 160000 (submodule), 000000 (deleted)."""
    size: int
    binary: bool
    link_target: str = ""


class DiffReport(Record):
    """Outcome of the static stage. `suspicions` are shown to a reader and never judged."""

    passed: bool
    reason: Reason | None
    detail: str
    checks: list[Check]
    changed: list[str]
    suspicions: list[str] = Field(default_factory=list)


class CheatOutcome(Record):
    """One planted cheat: what was expected and what the gate said."""

    cheat: str
    stage: str
    expected: list[Reason]
    got: Reason | None
    caught: bool
    evidence: str
    seconds: float


class SelfTestResult(Record):
    """Outcome of the self-test before round 1."""

    passed: bool
    outcomes: list[CheatOutcome]
    honest: list[CheatOutcome] = Field(default_factory=list)
    """Unchanged or honestly changed engines through the same checks: these must pass."""
    null_ratio: float | None = None
    null_low: float | None = None
    null_high: float | None = None
    null_decision: str = ""
    null_pairs: list[float] = Field(default_factory=list)
    """Ratios of the A/A pairs: the machine's noise, for the smallest effect that a comparison can detect."""
    min_effect: float = 1.0
    """The smallest gain that this run admits. Two processes of one program may differ by less: where their memory lies does that."""
    seconds: float = 0.0

    @property
    def biased(self) -> bool:
        """The same engine on both sides came out as different from itself, by as much as a gain that would be admitted."""
        if self.null_low is None or self.null_high is None:
            return False
        return self.null_low > self.min_effect or self.null_high < 1.0 / self.min_effect

    @property
    def told_apart(self) -> float | None:
        """The smallest ratio above 1 that the A/A pairs tell apart from none, either way round; infinite where they tell nothing."""
        if self.null_low is None or self.null_high is None:
            return None
        return max(self.null_high, 1.0 / self.null_low) if self.null_low > 0.0 else math.inf
