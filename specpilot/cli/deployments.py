"""`specpilot deployments ...`: look at deployment files and check them without running anything."""

from __future__ import annotations

import typer
from rich.markup import escape
from rich.table import Table

from specpilot.check import check
from specpilot.cli.options import Overrides, load
from specpilot.cli.tables import console
from specpilot.deployment import bundled_deployments, load_deployment
from specpilot.errors import SpecPilotError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at deployments and check them.")


@app.command("list")
def list_() -> None:
    """The deployments that come with SpecPilot."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "architecture", "drafter", "hardware", "concurrency", "temperature"):
        table.add_column(column, overflow="fold")
    for path in bundled_deployments():
        try:
            d = load_deployment(path)
        except SpecPilotError as error:
            table.add_row(escape(path.parent.name), escape(f"invalid: {error.message}"), "", "", "", "")
            continue
        cells = (d.name, d.target.architecture, str(d.drafter.method), d.hardware)
        table.add_row(*(escape(c) for c in cells), str(d.regime.concurrency), f"{d.regime.temperature:g}")
    console().print(table)


@app.command()
def validate(name: str, set_: Overrides = None) -> None:
    """Check a deployment and the files it names, without running anything."""
    deployment, path = load(name, set_)
    check(deployment)
    typer.echo(f"{path} is valid")


@app.command()
def show(name: str, set_: Overrides = None) -> None:
    """Print a deployment with every key, defaults included."""
    deployment, _ = load(name, set_)
    typer.echo(deployment.to_yaml(), nl=False)
