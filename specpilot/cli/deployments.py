"""`specpilot deployments ...`: look at deployment files and check them without running anything."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specpilot.cli.options import Overrides, load
from specpilot.deployment import Deployment, bundled_deployments, load_deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.errors import MissingModelError, SpecPilotError, UsageError

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
    Console().print(table)


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


def check(deployment: Deployment) -> None:
    """Raise for the first thing that would stop a run: engine tree, tunables, hardware sheet, prompt files, checkpoints,
    drafter."""
    spec = load_engine_spec(deployment.engine_tree())
    spec.tunables_text(deployment.engine.tunables)
    if deployment.hardware not in ("auto", "cpu"):
        from specpilot.costmodel.hardware import load_sheet

        load_sheet(deployment.hardware)
    missing = deployment.missing_files()
    prompts = [path for path in missing if path.suffix == ".jsonl"]
    if prompts:
        raise UsageError(
            f"deployment {deployment.name}: no file {', '.join(map(str, prompts))}",
            "correct workload, or write the prompts.",
        )
    from specpilot.evaluation.prompts import check_prompt_files

    check_prompt_files(deployment)
    if missing:
        raise MissingModelError(
            f"deployment {deployment.name}: no file {', '.join(map(str, missing))}",
            "give folders with config.json and safetensors weights as target.path and drafter.path.",
        )
    if deployment.drafter.path is not None:
        from specpilot.drafters import check_drafter

        target = None if deployment.target.path is None else deployment.resolve(deployment.target.path)
        check_drafter(deployment.resolve(deployment.drafter.path), target)
