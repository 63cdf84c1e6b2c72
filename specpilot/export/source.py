"""A run as the export reads it: its journal, its repository, and what was merged in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specpilot.deployment import Deployment, parse_deployment
from specpilot.errors import RunFolderError
from specpilot.evidence import check_run
from specpilot.journal import AttemptRow, Journal
from specpilot.paths import JOURNAL_NAME
from specpilot.run_lock import RunLock
from specpilot.workspace import Workspace


@dataclass(frozen=True)
class MergedStep:
    """One change of the head: from `before` to `after`."""

    name: str
    """Mechanism's name, else the attempt's id; unique in the run."""
    title: str
    before: str
    after: str
    attempt: AttemptRow | None
    """None for a change that no attempt stands for."""
    result: dict[str, Any] = field(default_factory=dict)
    """The merge step's own record: gain with interval over the head before it."""

    @property
    def headline(self) -> str:
        """Name and title, or the name alone where the title says no more."""
        return self.name if self.title == self.name else f"{self.name}: {self.title}"

    @property
    def claim(self) -> dict[str, Any]:
        """What the worker said about it."""
        candidate = (self.attempt.data.get("candidate") if self.attempt else None) or {}
        return dict(candidate.get("claim") or {})


@dataclass
class RunSource:
    """An open run folder. Read only."""

    run_dir: Path
    journal: Journal
    workspace: Workspace
    meta: dict[str, Any]
    deployment: Deployment

    @classmethod
    @contextmanager
    def open(cls, run_dir: Path) -> Iterator[RunSource]:
        """Open `run_dir`, whether or not it is being worked on. Raises `RunFolderError`, `TamperedEvidenceError`."""
        journal = Journal.open(run_dir / JOURNAL_NAME)
        try:
            meta = journal.meta()
            if "deployment" not in meta:
                raise RunFolderError(f"the journal of {run_dir} names no deployment", "start a new run.")
            folder = Path(meta.get("folder") or run_dir)
            deployment = parse_deployment(meta["deployment"], folder, f"deployment of {run_dir}")
            workspace = Workspace.open(run_dir, recover=False)
            check_run(run_dir, journal, workspace)
            yield cls(run_dir, journal, workspace, meta, deployment)
        finally:
            journal.close()

    @property
    def first(self) -> str:
        """Commit of the engine as the run found it."""
        return self.workspace.first_commit

    @cached_property
    def best(self) -> str:
        """Commit of the best engine."""
        return self.workspace.best()

    @property
    def running(self) -> str | None:
        """Who works on the run now, in words."""
        return RunLock.holder(self.run_dir)

    @property
    def run_id(self) -> str:
        """Identifier of the run."""
        return str((self.meta.get("run") or {}).get("run_id") or self.run_dir.name)

    @property
    def stop_reason(self) -> str:
        """Why the run ended, in the closed list's words."""
        return str(self.meta.get("stop_reason") or "not ended")

    @cached_property
    def results(self) -> dict[str, Any]:
        """Key of every finished step -> its result as plain JSON, in the order of their first start."""
        return {row.key: self.journal.result(row.key) for row in self.journal.steps() if row.finished}

    def step(self, key: str) -> dict[str, Any]:
        """Result of one step; empty when it has not finished."""
        value = self.results.get(key)
        return value if isinstance(value, dict) else {}

    @cached_property
    def merged(self) -> list[MergedStep]:
        """The changes that lead from the first commit to the best one, in order; together they are all of it."""
        attempts = {row.id: row for row in self.journal.attempts()}  # one that was taken out again is superseded
        records = [value for key, value in self.results.items() if "/merge" in key and _is_merge(value)]
        by_after = {value["after"]: value for value in records}
        chain: list[dict[str, Any]] = []
        commit = self.best
        while commit != self.first and commit in by_after and len(chain) <= len(records):
            chain.append(by_after[commit])
            commit = by_after[commit]["before"]
        steps: list[MergedStep] = []
        if commit != self.first:  # no record leads to here: one patch for what is left keeps the series whole
            steps.append(
                MergedStep(
                    "before-the-first-record", "Changes before the first recorded merge", self.first, commit, None
                )
            )
        names = {step.name for step in steps}
        for value in reversed(chain):
            row = attempts.get(value["attempt_id"])
            name = _name(row, value["attempt_id"], names)
            names.add(name)
            steps.append(MergedStep(name, _title(row, name), value["before"], value["after"], row, value))
        return steps


def _is_merge(value: Any) -> bool:
    wanted = {"attempt_id", "before", "after", "merged"}
    return isinstance(value, dict) and wanted <= set(value) and value["merged"] and value["before"] != value["after"]


def _name(row: AttemptRow | None, attempt_id: str, taken: set[str]) -> str:
    claim = ((row.data.get("candidate") if row else None) or {}).get("claim") or {}
    remember = (row.data.get("remember") if row else None) or {}
    name = str(claim.get("mechanism") or remember.get("name") or attempt_id)
    return name if name not in taken else f"{name}-{attempt_id}"


def _title(row: AttemptRow | None, name: str) -> str:
    if row is None:
        return name
    remember = row.data.get("remember") or {}
    text = str(remember.get("title") or row.data.get("task") or name).strip()
    return " ".join(text.removeprefix(f"Replay {name}:").split())[:100] or name
