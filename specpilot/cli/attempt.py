"""`specpilot attempt ...`: the way in for a person or any other agent; the same gate judges it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from specpilot.cli.options import RunName
from specpilot.cli.status import attempt_table
from specpilot.cli.tables import console
from specpilot.errors import NOT_ACCEPTED, UsageError
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME, find_run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Take part yourself: edit a worktree, submit it.")


@app.command("open")
def open_(
    run: RunName,
    component: Annotated[str, typer.Option(help="Component of the gap table to work on; `*`: any.")] = "*",
    task: Annotated[str, typer.Option(help="What is to be tried, in words.")] = "Make the decode round faster.",
) -> None:
    """Make a worktree at the best commit and print its brief."""
    folder = find_run(run)
    from specpilot.loop.external import open_attempt
    from specpilot.loop.run import open_run

    with open_run(folder, plain=True) as context:
        attempt_id, worktree, brief = open_attempt(context, component, task)
    typer.echo(brief)
    typer.echo(f"\nattempt  {attempt_id}\nworktree {worktree}")
    typer.echo(f"submit   specpilot attempt submit {folder.name} {attempt_id} --claim CLAIM.yaml")


@app.command()
def submit(
    run: RunName,
    attempt_id: Annotated[str, typer.Argument(metavar="ATTEMPT")],
    claim: Annotated[Path, typer.Option("--claim", help="File with the claim (see the brief).")],
) -> None:
    """Commit the worktree and have it measured and judged: now, or by the run in progress.

    Exit code 0: accepted, or waiting for the run in progress; 10: rejected.
    """
    folder = find_run(run)
    if not claim.is_file():
        raise UsageError(f"there is no claim file {claim}", "write one as the brief says and give it as --claim.")
    from specpilot.loop.external import submit_attempt
    from specpilot.loop.run import open_run

    with open_run(folder, plain=True) as context:
        assessment = submit_attempt(context, attempt_id, claim)
    if assessment is None:
        typer.echo(f"{attempt_id} submitted; the run in progress judges it in its next round")
        typer.echo("if it has none left, submit again once it has ended: the attempt waits")
        return
    if assessment.accepted:
        typer.echo(f"{attempt_id} accepted: {assessment.detail}")
        return
    typer.echo(f"{attempt_id} rejected ({assessment.reason}): {assessment.detail}")
    raise typer.Exit(NOT_ACCEPTED)


@app.command("list")
def list_(run: RunName = "latest") -> None:
    """All attempts of a run and where they stand."""
    journal = Journal.open(find_run(run) / JOURNAL_NAME)
    attempts = journal.attempts()
    console().print(attempt_table(attempts) if attempts else escape("no attempts yet"))
    journal.close()
