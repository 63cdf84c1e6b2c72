"""Counts of what really ran. A mechanism adds its own names, so that a claim can be checked against `/server_info`."""

from __future__ import annotations


class Counters:
    """Named monotone counters. Only the engine thread adds; any thread may take a snapshot."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to `name`, which starts at 0."""
        self._values[name] = self._values.get(name, 0) + amount

    def get(self, name: str) -> int:
        """Value of `name`, 0 if nothing was ever added."""
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, int]:
        """A copy of all values."""
        return dict(self._values)

    def reset(self) -> None:
        """Back to zero (tests only; a server never resets)."""
        self._values.clear()


COUNTERS = Counters()
