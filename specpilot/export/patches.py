"""`--format patches`: one reviewable patch per merged change, a series file and a cover letter.

Before anything is handed over, the series is applied to the first commit in a scratch repository; the result must be
the winning tree, byte for byte.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from specpilot.contracts import Record
from specpilot.errors import TamperedEvidenceError
from specpilot.export.evidence import _sha256
from specpilot.export.readme import figures, gate_words, sentence
from specpilot.export.source import MergedStep, RunSource
from specpilot.git import GitError, run_git

_SENDER = "SpecPilot <specpilot@localhost>"
_DATE = "Thu, 1 Jan 1970 00:00:00 +0000"
"""Patches of one run are the same bytes whenever they are exported."""


class Applied(Record):
    """The series was applied to the first commit's files and gave this git tree."""

    tree: str


def write_patches(source: RunSource, folder: Path) -> str:
    """Fill `folder` and check the series; the digest of `series`. Raises `TamperedEvidenceError`."""
    names = []
    for number, step in enumerate(source.merged, start=1):
        name = f"{number:04d}-{re.sub(r'[^A-Za-z0-9._-]+', '-', step.name)[:60]}.patch"
        text = _mail(source, step, number, len(source.merged))
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        names.append(name)
    (folder / "series").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    check_series(source, folder)
    (folder / "cover-letter.md").write_text(_cover(source, folder, names), encoding="utf-8")
    return _sha256(folder / "series")


def check_series(source: RunSource, folder: Path) -> Applied:
    """Apply the series in `folder` to the first commit's files. Raises `TamperedEvidenceError` unless it gives the best tree."""
    wanted = source.workspace._git("rev-parse", f"{source.best}^{{tree}}").strip()
    with tempfile.TemporaryDirectory(prefix="specpilot-series-", dir=folder.parent) as name:
        tree = Path(name) / "tree"
        source.workspace.export_tree(source.first, tree)
        _git(tree, "init", "-q")
        _git(tree, "add", "-A", "-f")
        _git(tree, "commit", "-q", "--allow-empty", "-m", "first")
        for patch in (folder / "series").read_text(encoding="utf-8").split():
            done = _git(
                tree, "am", "-q", "--keep-cr", "--whitespace=nowarn", str((folder / patch).resolve()), check=False
            )
            if done.returncode:
                words = (done.stderr or done.stdout).strip()[-600:]
                raise TamperedEvidenceError(f"{patch} does not apply to the stock engine: {words}", "export again.")
        found = _git(tree, "rev-parse", "HEAD^{tree}").stdout.strip()
    if found != wanted:
        raise TamperedEvidenceError(f"the series gives tree {found}, the winning engine is {wanted}", "export again.")
    return Applied(tree=found)


def _mail(source: RunSource, step: MergedStep, number: int, count: int) -> str:
    """A patch as `git am` reads it: subject, evidence, `---`, diff."""
    claim = step.claim
    body = [f"Component: {claim['component']}"] if claim.get("component") else []
    if claim.get("hypothesis"):
        body.append(f"Hypothesis: {claim['hypothesis']}")
    if step.result.get("gain"):
        effect = f"{step.result['gain']:.3f}x [{step.result['low']:.3f}, {step.result['high']:.3f}]"
        body.append(f"Effect: {effect} decode tokens/s over the engine before it, paired")
    if seen := gate_words(step):
        body.append(seen[0].upper() + seen[1:])
    if claim.get("counters"):
        body.append(f"Counters that grew: {', '.join(claim['counters'])}")
    body.append(f"Found by {step.attempt.worker if step.attempt else 'SpecPilot'} in run {source.run_id}")
    paragraphs = "\n".join(f"  {line}" for text in body for line in text.splitlines())  # indented: never a separator
    subject = re.sub(r"\s+", " ", step.headline)
    diff = source.workspace.diff(step.before, step.after)
    head = f"From {step.after} Mon Sep 17 00:00:00 2001\nFrom: {_SENDER}\nDate: {_DATE}\n"
    mime = "MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n"
    return f"{head}Subject: [PATCH {number}/{count}] {subject}\n{mime}\n{paragraphs}\n---\n{diff}-- \nSpecPilot\n"


def _cover(source: RunSource, folder: Path, names: list[str]) -> str:
    first_tree = source.workspace._git("rev-parse", f"{source.first}^{{tree}}").strip()
    best_tree = source.workspace._git("rev-parse", f"{source.best}^{{tree}}").strip()
    lines = [
        f"# {len(names)} patches for engine {source.deployment.engine.tree}, found by run {source.run_id}",
        "",
        f"Deployment {source.deployment.name}; the run ended: {source.stop_reason}.",
        f"Base: git tree {first_tree}. Result: git tree {best_tree} (checked when this was exported).",
        "",
        *figures(source),
        "",
        "## The series",
        "",
        *[
            f"- `{name}` (sha256 {_sha256(folder / name)})  \n  {sentence(s)}"
            for name, s in zip(names, source.merged, strict=True)
        ],
        "",
        "Apply in the order of `series`, in the engine's folder:",
        "",
        '    for p in $(cat series); do git am --keep-cr "$p"; done      # or: git apply "$p"',
        "",
    ]
    return "\n".join(lines)


def _git(tree: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = run_git(words, tree)
    if check and done.returncode:
        raise GitError(f"git {words[0]} failed in {tree}: {done.stderr.strip()[-1000:]}")
    return done
