"""What passes between a worker and the loop.

The loop builds a `WorkContext`, calls `Worker.plan`, and for each `Proposal` makes a worktree, an attempt and,
after `Proposal.apply`, a commit. A worker touches nothing but the worktree folder it is given and its own files
under `WorkContext.folder`.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from specpilot.memory import Hardware

GIT_TIMEOUT_S = 60


class AgentError(Exception):
    """A worker's input cannot be used: what was wrong, what to do, and the exit code for the command line."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class DoesNotApplyError(AgentError):
    """An edit does not fit the worktree; the message holds git's words. An attempt's fate, not a crash."""


@dataclass(frozen=True)
class ComponentGap:
    """One row of the cost model's table, milliseconds per decode round."""

    component: str
    measured_ms: float
    bound_ms: float
    recoverable_ms: float
    expected_gain: float
    """End-to-end decode ratio if this component alone reached its bound."""
    limit: str = ""
    """`bandwidth`, `compute` or `launch`."""


@dataclass(frozen=True)
class WorkContext:
    """What a worker may know at the start of a round."""

    run_id: str
    round: int
    folder: Path
    """Run-owned folder for the worker's own files; survives a resume."""
    tree: Path
    """Checkout of the base commit. Read only."""
    base_commit: str
    hardware: Hardware
    architecture: str
    drafter: str
    engine: str
    concurrency: int = 1
    temperature: float = 0.0
    block_size: int | None = None
    deployment_fingerprint: str = ""
    gaps: tuple[ComponentGap, ...] = ()
    """Most recoverable time first."""
    present: tuple[str, ...] = ()
    """Mechanisms merged into the base commit."""
    tried: frozenset[str] = frozenset()
    """Mechanisms that this run has tried already."""
    max_proposals: int = 4
    seed: int = 0


@dataclass(frozen=True)
class ClaimDraft:
    """The fields of `specpilot.contracts.Claim`, which the loop builds from `fields()`."""

    component: str
    hypothesis: str
    predicted_gain: float | None = None
    counters: tuple[str, ...] = ()
    forbidden_counters: tuple[str, ...] = ()
    mechanism: str | None = None

    def fields(self) -> dict[str, Any]:
        """Keyword arguments of `Claim`."""
        return {
            "component": self.component,
            "hypothesis": self.hypothesis,
            "predicted_gain": self.predicted_gain,
            "counters": list(self.counters),
            "forbidden_counters": list(self.forbidden_counters),
            "mechanism": self.mechanism,
        }


class Edit(Protocol):
    """A change of a worktree."""

    def apply(self, worktree: Path) -> list[str]:
        """Change files under `worktree`; the changed paths. Raises DoesNotApplyError and then changes nothing."""
        ...


@dataclass(frozen=True)
class PatchEdit:
    """A unified diff, applied as it is or, where the tree has moved on, by three-way merge."""

    patch: str

    def apply(self, worktree: Path) -> list[str]:
        """See `Edit`. The three-way merge is tried only in a clean worktree that knows the patch's blobs."""
        plain = _git(worktree, "apply", "--whitespace=nowarn", stdin=self.patch)
        if plain.returncode == 0:
            return self._paths(worktree)
        status = _git(worktree, "status", "--porcelain")
        if status.returncode == 0 and not status.stdout.strip():
            merged = _git(worktree, "apply", "--3way", "--whitespace=nowarn", stdin=self.patch)
            if merged.returncode == 0:
                return self._paths(worktree)
            _git(worktree, "reset", "-q", "--hard", "HEAD")  # it was clean: only the failed merge is undone
        raise DoesNotApplyError(f"the patch does not apply: {_first_lines(plain.stderr)}", "its base may have moved on")

    def applies(self, tree: Path) -> bool:
        """Whether the patch applies to `tree` as it is, without a merge. Changes nothing."""
        return _git(tree, "apply", "--check", "--whitespace=nowarn", stdin=self.patch).returncode == 0

    def _paths(self, worktree: Path) -> list[str]:
        listed = _git(worktree, "apply", "--numstat", "-z", stdin=self.patch).stdout
        return sorted(entry.split("\t", 2)[2] for entry in listed.split("\0") if entry.count("\t") == 2)


@dataclass(frozen=True)
class FileEdit:
    """Whole new contents of some files; None deletes one."""

    files: dict[str, str | None] = field(default_factory=dict)

    def apply(self, worktree: Path) -> list[str]:
        """See `Edit`. Paths are relative, with forward slashes, and stay inside the worktree."""
        targets = {name: _inside(worktree, name) for name in self.files}
        for name, target in targets.items():
            text = self.files[name]
            if text is None:
                target.unlink(missing_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return sorted(targets)


@dataclass(frozen=True)
class Proposal:
    """One change that a worker would like to have measured."""

    worker: str
    component: str
    task: str
    """What is done, in one or two plain sentences."""
    claim: ClaimDraft
    edit: Edit
    why: str = ""
    """Why here and now, in plain words."""
    mechanism: str | None = None
    """Name in memory, if it is a replay."""

    def apply(self, worktree: Path) -> list[str]:
        """Edit `worktree`; the changed paths. Raises DoesNotApplyError and then leaves it as it was."""
        return self.edit.apply(worktree)


class Worker(Protocol):
    """Someone who proposes."""

    name: str

    def plan(self, context: WorkContext) -> list[Proposal]:
        """Proposals for this round, best first; an empty list is a fine answer."""
        ...


def _inside(worktree: Path, name: str) -> Path:
    pure = PurePosixPath(name)
    target = worktree.joinpath(*pure.parts)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or pure.parts[0] == ".git":
        raise DoesNotApplyError(f"{name!r} is not a path inside the engine tree")
    if not target.parent.resolve().is_relative_to(worktree.resolve()) or target.is_symlink():
        raise DoesNotApplyError(f"{name!r} leads out of the engine tree through a link")
    return target


def _git(worktree: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Git in `worktree`, deaf to the user's configuration and to repositories further up."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(worktree.resolve().parent),
    }
    return subprocess.run(
        ["git", "-c", "core.autocrlf=false", *arguments],
        cwd=worktree,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        timeout=GIT_TIMEOUT_S,
    )


def _first_lines(text: str, count: int = 4) -> str:
    return "; ".join(line.strip() for line in text.strip().splitlines()[:count]) or "git gave no reason"
