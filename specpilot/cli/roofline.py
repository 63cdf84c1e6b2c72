"""`specpilot roofline`: what a decode round must cost on this machine, component by component."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specpilot.cli.options import DeploymentName, Overrides, load
from specpilot.paths import machine_file


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("roofline")(roofline)


def roofline(
    deployment: DeploymentName,
    set_: Overrides = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure this machine again.")] = False,
    accepted_length: Annotated[float, typer.Option(min=1.0, help="Committed tokens per round to assume.")] = 3.0,
) -> None:
    """Print the machine's roofs and the bound of each component; measures the machine once (seconds)."""
    from specpilot import costmodel
    from specpilot.models import ensure_models

    chosen, _ = load(deployment, set_)
    models = ensure_models(chosen, progress=lambda text: typer.echo(f"... {text}", err=True))
    hardware = costmodel.resolve_hardware(chosen.hardware, machine_file(), remeasure=remeasure)
    drafter = models.drafter if models.drafter in ("ngram", "none") else Path(models.drafter)
    rows = _block_size(models.drafter)
    regime = costmodel.Regime(
        rows=rows,
        requests=chosen.regime.concurrency,
        context_len=chosen.regime.input_tokens + chosen.regime.output_tokens // 2,
        accepted_length=min(accepted_length, float(rows)),
    )
    table = costmodel.analyse(None, models.target_dir, drafter, hardware, regime)
    console = Console()
    console.print(costmodel.machine_table(hardware))
    console.print(costmodel.rich_table(table, title=f"bound of a decode round, {chosen.name}"))


def _block_size(drafter: str) -> int:
    """Rows that go to verification: the drafter's block, 8 for prompt look-up, 1 without speculation."""
    if drafter == "none":
        return 1
    if drafter == "ngram":
        return 8
    config = json.loads((Path(drafter) / "config.json").read_text(encoding="utf-8"))
    return int(config.get("dflash_config", {}).get("block_size") or config.get("block_size", 16))
