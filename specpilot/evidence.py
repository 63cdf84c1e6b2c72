"""What a run keeps beside its journal, held against the journal: the repository's heads and objects, and sealed files.

The journal seals itself (`specpilot.seal`). What it names elsewhere is checked here, before anybody builds on it: the
commits (git's own digests, and that `first` and `best` are those that the journal recorded), the search workers' trial
files, the report. Reads only, except for `seal_file`. May import contracts, errors, git, journal and workspace.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from specpilot.contracts import StopReason
from specpilot.errors import TamperedEvidenceError
from specpilot.git import GitError, run_git
from specpilot.journal import Journal
from specpilot.workspace import Workspace

KEY = "evidence_files"
"""Meta key: path in the run folder -> `{"bytes": ..., "sha256": ...}` of the file as it was when it was sealed."""


def seal_file(journal: Journal, run_dir: Path, path: Path) -> None:
    """Record the digest of a finished file of the run. Sealing it again replaces what was recorded."""
    data = path.read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sealed: dict[str, Any] = journal.get_meta(KEY, {})
    name = path.relative_to(run_dir).as_posix()
    if sealed.get(name) != entry:
        journal.set_meta(KEY, sealed | {name: entry})


def check_file(journal: Journal, run_dir: Path, path: Path) -> None:
    """Raise `TamperedEvidenceError` if `path` is not as it was sealed. Files that may grow match by their sealed beginning."""
    name = path.relative_to(run_dir).as_posix()
    entry = journal.get_meta(KEY, {}).get(name)
    if entry is None:
        return
    data = path.read_bytes() if path.is_file() else b""
    data = data[: entry["bytes"]] if path.suffix == ".jsonl" else data
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        what = "was changed" if path.is_file() else "is missing"
        hint = (
            f"`specpilot report {run_dir.name}` writes it again from the journal."
            if path.suffix == ".html"
            else "nothing was removed; restore it from an untouched copy, or start a new run."
        )
        raise TamperedEvidenceError(f"{path} {what} since the run wrote it", hint)


def check_run(run_dir: Path, journal: Journal, workspace: Workspace | None = None) -> None:
    """Raise `TamperedEvidenceError` for a trial file or a repository that is not as the journal says."""
    for name in journal.get_meta(KEY, {}):
        if name.endswith(".jsonl"):
            check_file(journal, run_dir, run_dir / name)
    if workspace is not None:
        _check_repository(journal, workspace)


def _check_repository(journal: Journal, workspace: Workspace) -> None:
    hint = "nothing was removed; restore the run folder from an untouched copy, or start a new run."
    try:
        best = workspace.best()  # before the journal is read: a run in progress records a merge, then moves `best`
    except GitError as error:
        raise TamperedEvidenceError(f"{workspace.repo} is not as it was written: {error.message}", hint) from error
    # The two commits by name: what a killed git left of a worktree's references is nobody's forgery.
    heads = [workspace.first_commit, best]
    checked = run_git(["fsck", "--no-dangling", "--no-reflogs", "--no-progress", *heads], workspace.repo)
    if checked.returncode != 0:
        words = (checked.stderr or checked.stdout).strip().splitlines()
        raise TamperedEvidenceError(f"{workspace.repo} is not as it was written: {(words or ['git fsck'])[0]}", hint)
    if not journal.finished("preflight"):
        return
    first = journal.result("preflight")["first_commit"]
    if workspace.first_commit != first:
        raise TamperedEvidenceError(
            f"{workspace.repo} begins at {workspace.first_commit[:12]}, the run began at {first[:12]}", hint
        )
    if best not in _known_heads(journal, first):
        raise TamperedEvidenceError(
            f"{workspace.repo}: specpilot/best is {best[:12]}, which no recorded merge ended in", hint
        )


def _known_heads(journal: Journal, first: str) -> set[str]:
    """Commits that `best` may stand at.

    In a complete run: the one that the closing session measured, or what outsiders (`x/`) or a later leaving-out
    (`without/`) made of it since. Before that: any that a merge ended in, as a killed run may not have moved the branch yet.
    """
    merges = {key: journal.result(key) for key in journal.finished_keys(lambda key: "/merge" in key)}
    after = {key: value["after"] for key, value in merges.items() if isinstance(value, dict) and "after" in value}
    final, reason = journal.get_meta("final_head"), journal.get_meta("stop_reason")
    if final and reason and StopReason(reason).complete:
        return {final, *(commit for key, commit in after.items() if not key.startswith("r"))}
    return {first, *after.values()}
