"""The front of this room: `export_run`."""

from __future__ import annotations

from pathlib import Path

from specpilot.contracts import Record
from specpilot.errors import UsageError
from specpilot.export.engine import write_engine
from specpilot.export.patches import write_patches
from specpilot.export.source import RunSource
from specpilot.export.staging import staged

FORMATS = ("engine", "patches")


class ExportResult(Record):
    """What was written."""

    to: Path
    format: str
    commit: str
    """Commit of the exported engine in the run's repository."""
    mechanisms: list[str]
    """Merged changes, oldest first."""
    files: int
    bytes: int
    sums_sha256: str
    """Digest of evidence/SHA256SUMS (engine) or of series (patches): keep it apart from the folder, `verify.sh --expect` takes it."""


def export_run(run_dir: Path, to: Path, format: str = "engine") -> ExportResult:
    """Write the best engine of the run in `run_dir` to the new (or empty) folder `to`.

    Raises `UsageError` (unknown format, folder not empty), `RunFolderError` (no run, or one that was never prepared),
    `DigestError` (the drafter's weights changed since), `TamperedEvidenceError` (the patches do not give the winning
    tree), `DiskFullError`. Nothing is left at `to` on any error.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown export format {format!r}", f"one of: {', '.join(FORMATS)}.")
    with RunSource.open(run_dir) as source, staged(to) as folder:
        digest = write_engine(source, folder) if format == "engine" else write_patches(source, folder)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        return ExportResult(
            to=to.absolute(),
            format=format,
            commit=source.best,
            mechanisms=[step.name for step in source.merged],
            files=len(sizes),
            bytes=sum(sizes),
            sums_sha256=digest,
        )
