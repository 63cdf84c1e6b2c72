"""`specpilot roofline`: what a decode round must cost on this machine, component by component, and what a run's engine costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, Group
from rich.text import Text

from specpilot import costmodel
from specpilot.cli.options import Overrides, load
from specpilot.contracts import GapTable
from specpilot.cores import usable_cores
from specpilot.costmodel import speculation
from specpilot.deployment import Deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.errors import SpecPilotError, UsageError
from specpilot.journal import Journal
from specpilot.models import ResolvedModels
from specpilot.paths import JOURNAL_NAME, all_runs, find_run, machine_file
from specpilot.words import count

ASSUMED_LENGTH = 3.0
"""Accepted length where none is given and none was measured here."""
NGRAM_ROWS = 8
"""Rows assumed for prompt look-up, whose drafts vary in number."""

WEIGHT_FORMATS = ", ".join(costmodel.FORMATS)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("roofline")(roofline)


def roofline(
    deployment: Annotated[
        str | None,
        typer.Option("--deployment", "-d", help="Name of a bundled deployment, or path of a deployment.yaml."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Show the profiles of a run's engines: run id, folder, or `latest`.")
    ] = None,
    set_: Overrides = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure this machine again.")] = False,
    weights: Annotated[str, typer.Option(help=f"Weight format of the bound: {WEIGHT_FORMATS}.")] = "bfloat16",
    accepted_length: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Committed tokens per round to assume; default: what the newest run of this deployment measured of its "
            f"stock engine, else {ASSUMED_LENGTH:g}.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Print the machine's roofs and the bound of each component; measures the machine once (seconds)."""
    if weights not in costmodel.FORMATS:
        raise UsageError(f"no weight format {weights!r}", f"known: {WEIGHT_FORMATS}.")
    if (deployment is None) == (run is None):
        raise UsageError("roofline needs either --deployment or --run", "like: specpilot roofline -d NAME")
    if run is not None:
        _show_run(find_run(run), as_json)
        return
    assert deployment is not None
    chosen, _ = load(deployment, set_)
    try:
        _show_bounds(chosen, remeasure, costmodel.FORMATS[weights], accepted_length, as_json)
    except costmodel.CostModelError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Assumed:
    """What the bounds rest on beside the checkpoints and the machine."""

    accepted_length: float
    source: str
    """Where the accepted length comes from."""
    rows: int
    """Rows verified per round and request: the whole block."""
    context_len: int
    weight_bits: float

    @property
    def words(self) -> list[str]:
        """What the figures hold for, a sentence each."""
        return [
            f"accepted length {self.accepted_length:.2f}: {self.source}",
            f"The bound of a round holds for any accepted length, but only for {count(self.rows, 'verified row')} a request, context "
            f"{self.context_len} and {self.weight_bits:g} bits a weight. tokens/s and `over ar` hold only at that accepted length: an engine "
            "that accepts more is not held below them.",
        ]


def assumed_length(chosen: Deployment, models: ResolvedModels, rows: int, given: float | None) -> tuple[float, str]:
    """Committed tokens per round of `rows` rows, and where the figure comes from: given, measured by a run, or assumed.

    Raises `UsageError` where more is given than a round can commit.
    """
    if given is not None:
        if given > rows:
            raise UsageError(
                f"--accepted-length {given:g}: a round that verifies {count(rows, 'row')} commits at most {count(rows, 'token')}",
                f"give a number from 1 to {rows}.",
            )
        return given, "given as --accepted-length"
    for folder in reversed(all_runs()):
        try:
            measured = _measured_length(folder, chosen, models)
        except SpecPilotError:  # a damaged run says nothing here; `specpilot runs` names it
            continue
        if measured is not None and 1.0 <= measured <= rows:
            return measured, f"measured of the stock engine by run {folder.name}; --accepted-length sets another"
    assumed = min(ASSUMED_LENGTH, float(rows))
    return assumed, "assumed, no run of this deployment has measured it; --accepted-length sets another"


def _measured_length(folder: Path, chosen: Deployment, models: ResolvedModels) -> float | None:
    """Accepted length of a run's stock engine, the closing session's before the first look's; None if the run is of something else."""
    journal = Journal.open(folder / JOURNAL_NAME)
    try:
        meta = journal.meta()
        then = (yaml.safe_load(meta.get("deployment") or "") or {}) if isinstance(meta.get("deployment"), str) else {}
        if then.get("name") != chosen.name or not journal.finished("preflight"):
            return None
        ran: dict[str, Any] = journal.result("preflight")
        same = (ran.get("target_sha256"), ran.get("drafter_sha256")) == (models.target_sha256, models.drafter_sha256)
        sampled = float((then.get("regime") or {}).get("temperature", 0.0))
        method = (then.get("drafter") or {}).get("method")
        if not same or method != chosen.drafter.method.value or sampled != chosen.regime.temperature:
            return None
        head = str(meta.get("final_head") or "")
        for key in (f"final/{head[:12]}", "baselines"):
            figures = journal.result(key) if journal.finished(key) else {}
            length = ((figures.get("variants") or {}).get("stock") or {}).get("accepted_length")
            if length:
                return float(length)
        return None
    finally:
        journal.close()


def _show_bounds(
    chosen: Deployment, remeasure: bool, bits: float, accepted_length: float | None, as_json: bool
) -> None:
    """Bounds of an autoregressive and of a speculative round; nothing is run but the machine's probe."""
    from specpilot.models import ensure_models

    models = ensure_models(chosen, progress=lambda text: typer.echo(f"... {text}", err=True))
    device = load_engine_spec(chosen.engine_tree()).device
    hardware = costmodel.resolve_hardware(
        chosen.hardware,
        machine_file(),
        threads=chosen.engine.threads or usable_cores(),
        prefer=device,
        remeasure=remeasure,
    )
    drafter: Path | str = models.drafter if models.drafter in ("ngram", "none") else Path(models.drafter)
    tables = {"ar": costmodel.analyse(None, models.target_dir, None, hardware, regime(chosen, hardware, 1, bits))}
    rows = verified_rows(drafter)
    assumed = None
    if rows > 1:
        length, source = assumed_length(chosen, models, rows, accepted_length)
        speculative = regime(chosen, hardware, rows, bits, length)
        tables["speculative"] = costmodel.analyse(None, models.target_dir, drafter, hardware, speculative)
        assumed = Assumed(length, source, rows, speculative.context_len, bits)
    if as_json:
        told = None if assumed is None else asdict(assumed) | {"holds_for": assumed.words[-1]}
        found = {"hardware": hardware.as_dict(), "assumed": told, **{k: t.as_dict() for k, t in tables.items()}}
        typer.echo(json.dumps(found))
        return
    console = Console()
    sheet = costmodel.load_sheet("cpu-generic") if hardware.source == "measured" else None
    console.print(costmodel.machine_table(hardware, sheet))
    for note in hardware.notes:
        console.print(f"[dim]{note}[/dim]")
    for name, table in tables.items():
        load_now = table.hardware["regime"]
        title = (
            f"{name} round of {chosen.name}: {count(load_now['requests'], 'request')}, {count(load_now['rows'], 'row')}, "
            f"context {load_now['context_len']}, {bits:g} bits a weight"
        )
        console.print()
        console.print(costmodel.rich_table(table, title=title))
    for sentence in assumed.words if assumed else ():
        console.print(Text(sentence))
    console.print()
    console.print(_formats(tables))
    if rows > 1:
        console.print()
        console.print(_drafts(models.target_dir, drafter, hardware, tables["speculative"]))


def regime(
    chosen: Deployment, hardware: costmodel.Hardware, rows: int, bits: float, accepted_length: float = 1.0
) -> costmodel.Regime:
    """The deployment's load in the middle of an answer. A CPU engine computes, and so caches, in float32."""
    return costmodel.Regime(
        rows=rows,
        requests=chosen.regime.concurrency,
        context_len=chosen.regime.input_tokens + chosen.regime.output_tokens // 2,
        weight_bits=bits,
        kv_bits=32.0 if hardware.kind == "cpu" else 16.0,
        accepted_length=accepted_length,
    )


def verified_rows(drafter: Path | str) -> int:
    """Rows that go to verification: the drafter's block, some for prompt look-up, 1 without speculation."""
    if drafter == "none":
        return 1
    return NGRAM_ROWS if drafter == "ngram" else costmodel.drafter_shape(drafter).block_size


def _formats(tables: dict[str, costmodel.GapTable]) -> Any:
    """Bound of each round in each weight format: what a narrower format could buy on this machine."""
    from rich.table import Table

    grid = Table(header_style="bold", box=None, pad_edge=False)
    grid.add_column("format")
    for name in tables:
        grid.add_column(name, justify="right")
    for form in costmodel.FORMATS:
        grid.add_row(form, *(f"{table.hardware['bound_ms_by_format'][form]:.2f}" for table in tables.values()))
    return Group(Text("bound by weight format, ms a round", style="bold"), grid)


def _drafts(target: Path, drafter: Path | str, hardware: costmodel.Hardware, whole: costmodel.GapTable) -> Any:
    """The whole-round model at the bound: what verifying fewer drafts of each block would give."""
    from rich.table import Table

    load_now = costmodel.Regime(**whole.hardware["regime"])
    block = load_now.rows - 1
    rate = speculation.acceptance_for(whole.accepted_length, block)
    ar_ms = costmodel.bound_of(target, None, hardware, replace(load_now, rows=1, draft_rows=None)).ms
    grid = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("drafts verified", "accepted length", "bound ms", "tokens/s", "over ar"):
        grid.add_column(name, justify="right", no_wrap=True)
    for drafts in range(1, block + 1):
        length = speculation.accepted_length([rate] * drafts)
        regime_now = replace(load_now, rows=drafts + 1, draft_rows=block + 1, accepted_length=length)
        bound_ms = costmodel.bound_of(target, drafter, hardware, regime_now).ms
        per_s = 1e3 * load_now.requests * length / bound_ms
        over = speculation.ceiling(length, ar_ms, bound_ms)
        grid.add_row(str(drafts), f"{length:.2f}", f"{bound_ms:.2f}", f"{per_s:.1f}", f"{over:.2f}x")
    title = Text(
        f"ceiling by number of drafts, if each is accepted with probability {rate:.2f} (all at the bound)", style="bold"
    )
    return Group(title, grid)


def _show_run(folder: Path, as_json: bool) -> None:
    """Every gap table that a run recorded, in order."""
    journal = Journal.open(folder / JOURNAL_NAME)
    try:
        keys = [s.key for s in journal.steps() if s.finished and s.key.endswith(("/observe", "/gaps"))]
        tables = {key: journal.result(key, GapTable) for key in keys}
    finally:
        journal.close()
    if not tables:
        raise SpecPilotError(
            f"{folder.name} has profiled no engine yet", "wait for round 1 to begin, or resume the run."
        )
    if as_json:
        typer.echo(json.dumps({key: table.model_dump(mode="json") for key, table in tables.items()}))
        return
    console = Console()
    for key, table in tables.items():
        values = table.model_dump()
        own = costmodel.GapTable(**{**values, "rows": [costmodel.Gap(**row) for row in values["rows"]]})
        console.print(costmodel.rich_table(own, title=f"{key} ({table.commit[:12]})"))
        console.print()
