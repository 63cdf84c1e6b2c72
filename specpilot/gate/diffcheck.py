"""The static stage: what a candidate's diff may touch. Runs before anything of the candidate is started.

Judged: paths outside the engine's editable globs, the launch description, symbolic links that leave the
tree, submodules, compiled Python, large binary or text files. Reported and never judged: a list of suspicious lines for a human
reader. Reads the run's git repository through git's plumbing; executes nothing of the candidate.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from specpilot.contracts import Check, Reason
from specpilot.gate.errors import EvidenceError
from specpilot.gate.records import Change, DiffReport, GatePolicy
from specpilot.git import run_git
from specpilot.workspace import escapes

ALWAYS_FIXED = ("engine.toml", ".git", ".gitattributes", ".gitmodules", ".gitignore")
"""Never editable, whatever engine.toml says: how the engine is launched, and what git itself obeys."""

SUSPICIOUS: tuple[tuple[str, str], ...] = (
    (r"\b(socket|urllib|httpx|requests|aiohttp|ftplib)\b", "talks to a network"),
    (r"\bsubprocess\b|os\.(system|popen|exec|fork)|\bmultiprocessing\b", "starts processes"),
    (r"os\.environ|getenv", "reads the environment"),
    (r"time\.(time|perf_counter|monotonic|sleep)\w*\s*(=[^=]|\()|from time import", "touches the clock"),
    (r"\b(eval|exec|compile|__import__)\(|importlib|sys\.modules|setattr\(", "changes code at run time"),
    (
        r"return_logprob|logprob_start_len|top_logprobs|max_new_tokens\s*(==|<|>)|ignore_eos",
        "branches on how it is asked",
    ),
    (r"except( Exception| BaseException)?( as \w+)?:", "swallows errors broadly"),
    (r"\bpickle\b|\bmarshal\b|base64|zlib|torch\.load", "unpacks data"),
    (r"(open|Path)\(\s*[\"'](/|~)", "opens an absolute path"),
    (r"SIMULATE|accept_len|spec_verify_ct\s*=|completion_tokens\s*=", "writes a figure that it is judged by"),
    (r"hash\(|sha\d+|md5|lru_cache|functools\.cache|cached_answers|memo", "keys something by content"),
    (r"quant|int8|int4|float8|\.half\(|float16|\.to\(torch\.(int|uint)", "lowers precision"),
)
"""Patterns of added lines worth a human's eye. Each occurs in honest work too, hence no judgement."""


_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def check_changes(changes: Sequence[Change], editable: Callable[[str], bool], policy: GatePolicy) -> DiffReport:
    """Judge a diff from its list of changes. Pure."""
    changed = [c.path for c in changes]
    checks = [
        Check(name="diff.empty", passed=bool(changes), detail=f"{len(changes)} paths changed"),
        _named("diff.editable", [c.path for c in changes if not _may_edit(c.path, editable)], "not editable"),
        _named("diff.links", [f"{c.path} -> {c.link_target}" for c in changes if _leaves(c)], "links out of the tree"),
        _named(
            "diff.compiled",
            [c.path for c in changes if _compiled(c)],
            "compiled Python that would run instead of the text",
        ),
        _named("diff.size", [f"{c.path} ({c.size} bytes)" for c in changes if _too_big(c, policy)], "too large"),
    ]
    failed = next((c for c in checks if not c.passed), None)
    reason = None
    if failed is not None:
        reason = Reason.empty_diff if failed.name == "diff.empty" else Reason.outside_editable
    return DiffReport(
        passed=failed is None,
        reason=reason,
        detail="" if failed is None else failed.detail,
        checks=checks,
        changed=changed,
    )


def check_diff(
    repository: Path, base: str, commit: str, editable: Callable[[str], bool], policy: GatePolicy | None = None
) -> DiffReport:
    """Static stage for `base..commit` in `repository` (any worktree of it), with the suspicion list.

    `editable`: `EngineSpec.editable`. Raises EvidenceError when git cannot read the two commits.
    """
    report = check_changes(read_changes(repository, base, commit), editable, policy or GatePolicy())
    patch = _git(
        repository, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "-U0", base, commit
    )
    unread = [f"{path}: cannot be read: binary" for path in sorted(_binary_paths(repository, base, commit))]
    return report.model_copy(update={"suspicions": suspicions(patch) + unread})


def read_changes(repository: Path, base: str, commit: str) -> list[Change]:
    """Changed paths with mode, size and kind; renames count as a deletion and an addition, so both ends are judged."""
    raw = _git(repository, "diff", "--raw", "-z", "--no-renames", "--no-abbrev", base, commit).split("\0")
    binary = _binary_paths(repository, base, commit)
    changes = []
    for header, path in zip(raw[0::2], raw[1::2], strict=False):
        _, mode, _, blob, status = header.lstrip(":").split(" ")
        is_file = mode in ("100644", "100755", "120000")
        changes.append(
            Change(
                path=path,
                status=status[:1],
                mode=mode,
                size=int(_git(repository, "cat-file", "-s", blob)) if is_file else 0,
                binary=path in binary,
                link_target=_git(repository, "cat-file", "blob", blob) if mode == "120000" else "",
            )
        )
    return changes


def suspicions(patch: str) -> list[str]:
    """Suspicious added lines of a patch in git's format with no context lines, as `path: why: line`."""
    found: list[str] = []
    path, in_hunk = "?", 0
    # By line feeds only, and headers outside hunks only: a form feed before a statement, or `++ x`, must hide nothing.
    for line in patch.split("\n"):
        if in_hunk and line.startswith(("+", "-")):
            in_hunk -= 1
        elif hunk := _HUNK.match(line):
            in_hunk = int(hunk[1] or 1) + int(hunk[2] or 1)
            continue
        elif line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
            continue
        if line.startswith("+"):
            for pattern, why in SUSPICIOUS:
                if re.search(pattern, line):
                    found.append(f"{path}: {why}: {line[1:].strip()[:120]}")
    return found


def _named(name: str, faults: list[str], what: str) -> Check:
    detail = f"{len(faults)} {what}: {', '.join(faults[:5])}" if faults else f"none {what}"
    return Check(name=name, passed=not faults, detail=detail)


def _may_edit(path: str, editable: Callable[[str], bool]) -> bool:
    clean = posixpath.normpath(path)
    if clean != path or clean.startswith(("/", "..")):
        return False
    if any(part in ALWAYS_FIXED[1:] for part in path.split("/")) or path == ALWAYS_FIXED[0]:
        return False
    return editable(path)


def _leaves(change: Change) -> bool:
    if change.mode == "160000":
        return True
    return change.mode == "120000" and escapes(change.path, change.link_target)


def _compiled(change: Change) -> bool:
    """Python takes a compiled file for its module's text, and may be told not to compare the two: nobody reads what runs then."""
    parts = change.path.lower().split("/")
    return change.status != "D" and ("__pycache__" in parts or parts[-1].endswith((".pyc", ".pyo")))


def _too_big(change: Change, policy: GatePolicy) -> bool:
    return change.size > (policy.max_binary_bytes if change.binary else policy.max_text_bytes)


def _binary_paths(repository: Path, base: str, commit: str) -> set[str]:
    rows = _git(repository, "diff", "--numstat", "-z", "--no-renames", "--no-textconv", base, commit).split("\0")
    return {row.split("\t", 2)[2] for row in rows if row.startswith("-\t-\t")}


def _git(repository: Path, *arguments: str) -> str:
    done = run_git(["-c", "core.quotepath=off", "-c", "diff.external=", *arguments], repository)
    if done.returncode != 0:
        raise EvidenceError(
            f"git {arguments[0]} failed in {repository}: {done.stderr.strip()}",
            "is the commit in the run's repository?",
        )
    return done.stdout
