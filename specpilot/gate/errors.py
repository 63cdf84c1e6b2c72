"""Failures of the gate itself. A candidate's failure is never an exception here: it is a verdict with a reason."""

from __future__ import annotations

from specpilot.errors import GateUnsoundError, InfrastructureError

__all__ = ["EvidenceError", "GateUnsoundError"]


class EvidenceError(InfrastructureError):
    """The reference or the evaluation gave evidence that cannot be read. Never held against a candidate."""
