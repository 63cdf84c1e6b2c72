"""Wall-clock, rounds and money of one run, across resumes.

The clock counts time in which the run's process was alive; of a run that had ended, only from the first step that
is done after all, so that looking at it again is free. Exhaustion never throws work away: the loop
asks before it starts something new, keeps a reserve for the closing measurement, and finishes what is paid for.
"""

from __future__ import annotations

import time

from specpilot.contracts import StopReason
from specpilot.deployment import Budget
from specpilot.journal import Journal

CLOSING_RESERVE_S = 150.0
"""Seconds kept back for the final four-way measurement and the report."""


class BudgetClock:
    """Counts wall-clock seconds of this run, also over earlier sessions recorded in the journal."""

    def __init__(self, budget: Budget, journal: Journal) -> None:
        self.budget = budget
        self.journal = journal
        self._before = float(journal.meta().get("elapsed_s", 0.0))
        self._start = None if journal.get_meta("stop_reason") else time.monotonic()

    @property
    def limit_s(self) -> float | None:
        """Wall-clock limit in seconds, or None for no limit."""
        minutes = self.budget.wall_clock_minutes
        return None if minutes is None else minutes * 60.0

    def elapsed_s(self) -> float:
        """Seconds used by this and earlier sessions."""
        start = self._start if self._start is not None else self.journal.worked_since
        return self._before + (0.0 if start is None else time.monotonic() - start)

    def remaining_s(self) -> float:
        """Seconds left; infinite without a limit."""
        return float("inf") if self.limit_s is None else self.limit_s - self.elapsed_s()

    def save(self) -> None:
        """Writes the elapsed time, so that a resumed run continues the same clock."""
        self.journal.set_meta("elapsed_s", self.elapsed_s())

    def may_start(self, expected_s: float) -> StopReason | None:
        """None if work of about `expected_s` seconds may start now, else the stop reason."""
        self.save()
        if self.remaining_s() - CLOSING_RESERVE_S < expected_s:
            return StopReason.budget_wall_clock
        return None
