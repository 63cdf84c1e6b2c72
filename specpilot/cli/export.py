"""`specpilot export` and `specpilot report`: what a run hands back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from specpilot.cli.options import RunName
from specpilot.errors import UsageError
from specpilot.paths import find_run


class Format(StrEnum):
    """What to export."""

    engine = "engine"
    patches = "patches"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("export")(export)
    app.command("report")(report)


def export(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; must not exist or be empty.")],
    format: Annotated[
        Format, typer.Option(help="A self-contained engine, or one patch per mechanism.")
    ] = Format.engine,
) -> None:
    """Write what a run found, with its evidence, into a folder of its own."""
    folder = find_run(run)
    destination = to.expanduser().resolve()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(f"{destination} exists and is not an empty folder", "give a new folder as --to.")
    from specpilot.export import export_run

    result = export_run(folder, destination, format=str(format))
    typer.echo(f"exported to {destination}: {result.files} files, {len(result.mechanisms)} merged changes")
    if format is Format.engine:
        typer.echo(f"digest of evidence/SHA256SUMS, for `verify.sh --expect`: {result.sums_sha256}")


def report(run: RunName = "latest") -> None:
    """Write the report of a run again; prints its path."""
    folder = find_run(run)
    from specpilot.evidence import seal_file
    from specpilot.loop.run import open_run
    from specpilot.loop.summary import report_data
    from specpilot.report.html import write_report

    with open_run(folder) as context:
        path = write_report(report_data(context), folder / "report.html")
        seal_file(context.journal, folder, path)
        typer.echo(path)
