"""Wall-clock and rounds of one run, across resumes.

The clock counts time in which the run's process was alive; of a run that had ended, only from the first step that
is done after all, so that looking at it again is free. Exhaustion never throws work away: the loop
asks before it starts something new, keeps a reserve for the closing measurement, and finishes what is paid for.
"""

from __future__ import annotations

import math
import time
from typing import Any

from specpilot.contracts import StopReason
from specpilot.deployment import Budget
from specpilot.errors import UsageError
from specpilot.journal import Journal

CLOSING_RESERVE_S = 150.0
"""Seconds kept back for the final four-way measurement and the report."""


EXPECTED_ASSESS_S = 75.0
"""Seconds that measuring and judging one candidate takes, about. Recorded runs: 64 to 70 without a gain, 57 to 107 with one."""
LEAST_MINUTES = (CLOSING_RESERVE_S + EXPECTED_ASSESS_S) / 60.0
"""One candidate and the closing session; with less nothing would be measured in between."""
EXTENDED = "budget"
"""Meta key of the limits that `specpilot resume --minutes | --rounds` set; they hold for every later resume, too."""


def in_force(budget: Budget, journal: Journal) -> Budget:
    """The deployment's budget with the limits that resumes have set since."""
    return budget.model_copy(update=journal.get_meta(EXTENDED, {}))


def extend(budget: Budget, journal: Journal, minutes: float | None, rounds: int | None) -> Budget:
    """Gives the run `minutes` beyond its limit (from now, if that is spent) and `rounds` beyond its last; kept in the journal.

    Minutes alone for a run whose last round the clock cut short are worth one round more.
    Raises `UsageError` for what is no extension.
    """
    now = in_force(budget, journal)
    limits: dict[str, Any] = dict(journal.get_meta(EXTENDED, {}))
    if minutes is not None:
        if not 0 < minutes <= 1_000_000 or not math.isfinite(minutes):
            raise UsageError(f"--minutes {minutes:g} is no extension", "give the further minutes, above 0.")
        if now.wall_clock_minutes is None:
            raise UsageError("this run has no wall-clock limit", "leave --minutes out.")
        used = float(journal.get_meta("elapsed_s", 0.0)) / 60.0
        limits["wall_clock_minutes"] = max(now.wall_clock_minutes, used) + minutes
        if limits["wall_clock_minutes"] - used < LEAST_MINUTES:
            raise UsageError(
                f"--minutes {minutes:g} is too little: one candidate and the closing session take about {LEAST_MINUTES:.1f}",
                f"give at least {LEAST_MINUTES:.1f}.",
            )
    if rounds is not None:
        if not 0 < rounds or now.rounds + rounds > 1000:
            raise UsageError(f"--rounds {rounds} is no extension", "give the further rounds, 1 or more.")
        limits["rounds"] = now.rounds + rounds
    if minutes is None and rounds is None:
        return now
    last = f"r{now.rounds}/result"
    if rounds is None and journal.finished(last) and journal.result(last)["stop"] == StopReason.budget_wall_clock:
        limits["rounds"] = now.rounds + 1  # the last round was cut short: what it could not measure gets one of its own
    journal.set_meta(EXTENDED, limits)
    journal.set_meta("stop_reason", None)  # it is owed work again
    extended = in_force(budget, journal)
    journal.event("extended", {"wall_clock_minutes": extended.wall_clock_minutes, "rounds": extended.rounds})
    return extended


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
