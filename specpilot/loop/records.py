"""What the loop itself writes to the journal, beside the contracts."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict

from specpilot.contracts import Candidate, Comparison, Reason, Record, StopReason, Verdict


class RunMeta(Record):
    """Identity of a run, fixed when it is created. Fields that earlier versions wrote and nobody reads are passed over."""

    model_config = ConfigDict(extra="ignore")

    run_id: str
    deployment_name: str
    deployment_path: str
    created: str
    secret: str
    """Seeds every nonce of the run's prompts; never shown to a candidate."""
    version: str
    memory_url: str


class Prepared(Record):
    """What preflight found: the identities that every later step asserts."""

    target_dir: str
    target_sha256: str
    drafter: str
    drafter_sha256: str | None
    first_commit: str
    architecture: str
    block_size: int | None
    python: str


class Submitted(Record):
    """One attempt as it left a worker: a candidate, or the reason why there is none."""

    attempt_id: str
    worker: str
    component: str
    why: str
    candidate: Candidate | None
    reason: Reason | None = None
    detail: str = ""


class WorkerResult(Record):
    """All attempts of one worker in one round."""

    worker: str
    attempts: list[Submitted]
    note: str = ""


class Assessment(Record):
    """Measurement and judgement of one candidate against one base."""

    attempt_id: str
    base_commit: str
    commit: str
    comparison: Comparison | None
    verdict: Verdict | None
    accepted: bool
    reason: Reason | None
    detail: str


class Merged(Record):
    """One step of the merge: the head after it, and what the step gained over the head before it."""

    attempt_id: str
    before: str
    after: str
    merged: bool
    reason: Reason | None
    detail: str
    gain: float | None
    low: float | None
    high: float | None


class Without(StrEnum):
    """What leaving one merged change out of the final engine showed: a closed list, printed and stored."""

    still_helps = "still-helps"
    no_visible_effect = "no-visible-effect"
    hurts = "hurts"
    not_told = "not-told"
    """It could not be taken out, or the engine does not work without it."""


class LeftOut(Record):
    """One merged change against the final engine without it. `gain`: the whole over the rest, with interval."""

    attempt_id: str
    name: str
    outcome: Without
    detail: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    head: str | None = None
    commit: str | None = None
    """The engine without it, if that one is faster and passed the gate."""


class RoundResult(Record):
    """Where a round left the engine."""

    round: int
    head: str
    attempts: list[str]
    merged: list[str]
    stop: StopReason | None = None
    """Why the run should not begin another round, if it should not."""
