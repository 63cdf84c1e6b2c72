"""`specpilot fetch`: get and convert the checkpoints of a deployment, without a run."""

from __future__ import annotations

import typer

from specpilot.cli.options import DeploymentName, Overrides, load


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fetch")(fetch)


def fetch(deployment: DeploymentName, set_: Overrides = None) -> None:
    """Fetch, check and convert the checkpoints of a deployment; nothing to do the second time."""
    from specpilot.models import ensure_models

    chosen, _ = load(deployment, set_)
    found = ensure_models(chosen, progress=lambda text: typer.echo(f"... {text}", err=True))
    typer.echo(f"target   {found.target_dir}\n         sha256 {found.target_sha256}")
    typer.echo(
        f"drafter  {found.drafter}" + (f"\n         sha256 {found.drafter_sha256}" if found.drafter_sha256 else "")
    )
