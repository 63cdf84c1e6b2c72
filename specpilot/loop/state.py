"""Questions about where a run stands, answered from its journal and its repository alone."""

from __future__ import annotations

from collections.abc import Iterator

from specpilot.contracts import AttemptState, GapTable
from specpilot.journal import AttemptRow
from specpilot.loop.context import RunContext
from specpilot.loop.records import Merged


def head_of(context: RunContext) -> str:
    """Commit of the best engine so far."""
    return context.trees.best()


def merged_mechanisms(context: RunContext) -> list[str]:
    """Names of the mechanisms in the best engine, oldest first."""
    names = map(mechanism_of, context.journal.attempts(state=AttemptState.merged))
    return [name for name in names if name]


def mechanism_of(row: AttemptRow) -> str | None:
    """Name of the mechanism that an attempt replays, or that its submitter wants it to be remembered as."""
    claim = (row.data.get("candidate") or {}).get("claim") or {}
    remember = row.data.get("remember") or {}
    return claim.get("mechanism") or row.data.get("mechanism") or remember.get("name")


def merge_records(context: RunContext) -> list[Merged]:
    """Every finished step of a merge that changed the head, in the order in which they were laid on."""
    keys = context.journal.finished_keys(lambda key: "/merge" in key and not key.endswith("/assess"))
    steps: list[Merged] = [context.journal.result(key, Merged) for key in keys]
    return [step for step in steps if step.merged]


def profile_of(context: RunContext, commit: str) -> GapTable | None:
    """The newest gap table of an engine, if it was profiled and told something."""
    return next((table for table in _profiles(context) if table.commit == commit and table.rows), None)


def present_gaps(context: RunContext) -> GapTable | None:
    """The newest gap table on record."""
    return next(_profiles(context), None)


def _profiles(context: RunContext) -> Iterator[GapTable]:
    """The run's gap tables, newest first."""
    for key in reversed(context.journal.finished_keys(lambda key: key.endswith(("/observe", "/gaps")))):
        yield context.journal.result(key, GapTable)
