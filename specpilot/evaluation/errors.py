"""What can go wrong between the evaluator and an engine, typed so that a failure is never mistaken for a score.

An `EngineError` says which closed-list `Reason` applies *if* the engine was the candidate. Whether it was is
known only to the caller: `blame_candidate` turns it into `CandidateFailed`; anywhere else it is infrastructure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from specpilot.contracts import Reason
from specpilot.errors import InfrastructureError, SpecPilotError


class EngineError(InfrastructureError):
    """An engine did not do what the protocol asks; infrastructure until somebody is blamed."""

    reason: ClassVar[Reason] = Reason.crashed


class EngineCrash(EngineError):
    """The process died, or closed the connection in the middle of an answer, or answered 5xx."""

    reason = Reason.crashed


class EngineTimeout(EngineError):
    """No complete answer before the deadline."""

    reason = Reason.timed_out


class EngineProtocol(EngineError):
    """The answer cannot be read: not JSON, missing fields, ids that are not ids, no end mark, 4xx."""

    reason = Reason.missing_responses


class ShortAnswer(EngineError):
    """A timed request came back with another number of tokens than was asked for."""

    reason = Reason.length_mismatch


class UnstreamedAnswer(EngineError):
    """A timed answer arrived at once, so that no decode rate can be taken from it."""

    reason = Reason.accounting_mismatch


class StartFailed(EngineError):
    """The engine did not become ready; the message carries the tail of its log."""

    reason = Reason.start_failed


class WrongIdentity(EngineError):
    """The process that answers is not the engine, commit, variant or checkpoint that was asked for."""

    reason = Reason.wrong_identity


class WrongWeights(WrongIdentity):
    """The engine serves other weights than the run's checkpoints."""

    reason = Reason.wrong_weights


class LimitExceeded(EngineError):
    """The sandbox ended the process for its use of memory, time or output."""

    reason = Reason.resource_limit


class CandidateFailed(SpecPilotError):
    """The candidate, not the machine, is to blame: a verdict on the candidate."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"candidate failed ({reason.value}): {detail}", "the attempt is rejected; the run goes on")
        self.reason = reason
        self.detail = detail


@contextmanager
def blame_candidate() -> Iterator[None]:
    """Turns an `EngineError` raised inside the block into `CandidateFailed`."""
    try:
        yield
    except EngineError as error:
        raise CandidateFailed(error.reason, error.message) from error
