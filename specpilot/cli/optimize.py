"""`specpilot optimize` and `specpilot resume`: the main job."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated

import typer

from specpilot.check import check
from specpilot.cli.options import DeploymentName, Overrides, Plain, RunName, load
from specpilot.paths import find_run, runs_dir


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("optimize")(optimize)
    app.command("resume")(resume)


def optimize(
    deployment: DeploymentName,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; default: a new one in the home folder.")
    ] = None,
    set_: Overrides = None,
    minutes: Annotated[float | None, typer.Option(help="Wall-clock budget; budget.wall_clock_minutes.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds; budget.rounds; 0 only prepares a run for `attempt`.")
    ] = None,
    plain: Plain = False,
) -> None:
    """Search for the fastest engine for a deployment; prints where the run and its report are."""
    overrides = list(set_ or ())
    if minutes is not None:
        overrides.append(f"budget.wall_clock_minutes={minutes}")
    if rounds is not None:
        overrides.append(f"budget.rounds={rounds}")
    chosen, source = load(deployment, overrides)
    check(chosen)
    folder = new_run_dir(run_dir, chosen.name)
    from specpilot.loop.run import optimize as run

    raise typer.Exit(run(chosen, folder, source=source, plain=plain).exit_code)


def resume(
    run: RunName = "latest",
    minutes: Annotated[
        float | None, typer.Option(help="Give it so many more minutes: beyond its limit, or from now if that is spent.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Give it so many more rounds.")] = None,
    plain: Plain = False,
) -> None:
    """Go on with a run that was interrupted, or give one more time; finished steps are not repeated."""
    folder = find_run(run)
    from specpilot.loop.run import resume as go_on

    raise typer.Exit(go_on(folder, plain=plain, minutes=minutes, rounds=rounds).exit_code)


def new_run_dir(wanted: Path | None, name: str) -> Path:
    """Folder for a new run: the wanted one, or one of a new name in the home folder."""
    if wanted is None:
        return runs_dir() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(2)}"
    return wanted.expanduser().resolve()
