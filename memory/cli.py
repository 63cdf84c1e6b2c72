"""`specpilot memory ...`: look into the store, move it, verify what it claims.

`make_app(replay)` builds the commands; the front door passes the loop's replay so that `verify` can measure a
mechanism again. Nothing here measures by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .database import default_url
from .errors import MemoryError_
from .records import Effect, StoredMechanism
from .store import MemoryStore

Replay = Callable[[StoredMechanism, str], int]
"""(mechanism, deployment name) -> exit code: measures and gates the mechanism again through the loop."""

Url = Annotated[
    str | None, typer.Option("--url", help="SQLAlchemy URL or path of the store.", envvar="SPECPILOT_MEMORY_URL")
]
RATIO_TOLERANCE = 5e-3
"""Relative difference allowed between a stored ratio and the geometric mean of its samples (rounding)."""


def make_app(replay: Replay | None = None) -> typer.Typer:
    """The `memory` command group."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="What earlier runs learned."
    )
    console = _Out()

    @app.command()
    def inspect(url: Url = None) -> None:
        """Overview of the store, and how often recall helped."""
        with _open(url) as store:
            found, stats = store.mechanisms(), store.stats()
        console.print(_overview(found) if found else "the memory is empty")
        effects = ", ".join(f"{count} {outcome}" for outcome, count in sorted(stats.effects.items())) or "none"
        console.print(f"effects: {effects}; deployments: {escape(', '.join(stats.deployments)) or 'none'}")
        console.print(f"recall: {stats.helped}")

    @app.command()
    def show(
        name: str, url: Url = None, patch: Annotated[bool, typer.Option(help="Print the patch too.")] = False
    ) -> None:
        """One mechanism with its evidence."""
        with _open(url) as store, _clear():
            stored = store.get(name)
        for line in describe(stored):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if patch:
            typer.echo(stored.mechanism.patch, nl=False)

    @app.command()
    def search(text: str, url: Url = None) -> None:
        """Mechanisms that mention every word of TEXT."""
        with _open(url) as store, _clear():
            found = store.search(text)
        console.print(_overview(found) if found else f"nothing mentions {text!r}")

    @app.command("export")
    def export_(file: Path, url: Url = None) -> None:
        """Write the whole store to FILE."""
        with _open(url) as store, _clear():
            count = store.export(file)
        console.print(f"wrote {count} mechanisms to {escape(str(file))}")

    @app.command("import")
    def import_(file: Path, url: Url = None) -> None:
        """Merge FILE, written by `export`, into the store."""
        with _open(url) as store, _clear():
            mechanisms, effects = store.import_(file)
        console.print(f"{mechanisms} new mechanisms, {effects} new effects")

    @app.command()
    def verify(
        name: str,
        url: Url = None,
        deployment: Annotated[str | None, typer.Option(help="Replay on this deployment only.")] = None,
        run: Annotated[bool, typer.Option("--run", help="Measure and gate it again.")] = False,
    ) -> None:
        """Check the stored evidence of NAME and list (or, with --run, do) the measurements that would renew it."""
        with _open(url) as store, _clear():
            stored = store.get(name)
        problems = check_evidence(stored)
        for problem in problems:
            console.print(f"evidence: {problem}", markup=False)
        if not stored.effects:
            console.print("evidence: no effect was ever recorded: the mechanism is unproven")
        elif not problems:
            console.print(
                f"evidence: effects ({len(stored.effects)}) agree with their samples; the patch matches its checksum"
            )
        targets = replay_targets(stored, deployment)
        for target in targets:
            console.print(f"replay: {name} version {stored.version} on {target}", markup=False)
        if run:
            if replay is None:
                typer.echo(
                    "error: a replay was not connected to this command\n"
                    "  hint: 'specpilot optimize' on the deployment recalls the mechanism and measures it again",
                    err=True,
                )
                raise typer.Exit(2)
            codes = [replay(stored, target) for target in targets]
            raise typer.Exit(next((code for code in codes if code), 8 if problems else 0))
        raise typer.Exit(8 if problems else 0)

    return app


def replay_targets(stored: StoredMechanism, deployment: str | None) -> list[str]:
    """Deployments on which a replay would run: the given one, else each one with an effect."""
    return [deployment] if deployment else sorted({effect.deployment for effect in stored.effects})


def check_evidence(stored: StoredMechanism) -> list[str]:
    """What in the stored evidence contradicts itself; empty when sound."""
    problems = []
    for effect in stored.effects:
        where = f"{effect.deployment} {effect.at:%Y-%m-%d}" if effect.at else effect.deployment
        if not effect.samples:
            problems.append(f"{where}: no raw samples behind {effect.ratio:.3f}x")
            continue
        mean = math.exp(sum(map(math.log, effect.samples)) / len(effect.samples))
        if abs(mean / effect.ratio - 1) > RATIO_TOLERANCE:
            problems.append(f"{where}: stored {effect.ratio:.3f}x, but its samples give {mean:.3f}x")
        if effect.outcome == "verified" and effect.gate.get("passed") is False:
            problems.append(f"{where}: called verified, but its gate did not pass")
    return problems


def describe(stored: StoredMechanism) -> list[str]:
    """Plain lines for `show`."""
    mechanism = stored.mechanism
    lines = [
        f"{mechanism.name} version {stored.version} ({stored.status}, from {stored.origin}, {stored.created:%Y-%m-%d})",
        f"  {mechanism.title}",
        f"  component: {mechanism.component}",
        f"  hypothesis: {mechanism.hypothesis.strip()}",
        f"  preconditions: {mechanism.preconditions.model_dump_json(exclude_defaults=True)}",
        f"  requires: {', '.join(mechanism.requires) or 'nothing'}",
        f"  must grow: {', '.join(mechanism.counters) or '-'}; must not: {', '.join(mechanism.forbidden_counters) or '-'}",
        f"  patch: {len(mechanism.patch.splitlines())} lines, sha256 {mechanism.patch_sha256}",
    ]
    if mechanism.notes:
        lines.append(f"  notes: {mechanism.notes.strip()}")
    return lines + [_effect_line(effect) for effect in stored.effects]


def _effect_line(effect: Effect) -> str:
    length = ""
    if effect.accepted_length_before and effect.accepted_length_after:
        length = f", accepted length {effect.accepted_length_before:.2f} -> {effect.accepted_length_after:.2f}"
    outcome = effect.outcome if effect.outcome == "verified" else f"refuted: {effect.reason}"
    where = f"{effect.deployment} on {effect.hardware.name or effect.hardware.hardware_class}"
    when = f"{effect.at:%Y-%m-%d %H:%M} UTC" if effect.at else "no date"
    return (
        f"  effect: {effect.ratio:.3f}x [{effect.low:.3f}, {effect.high:.3f}] over {len(effect.samples)} pairs, {where}"
        f"{length} ({outcome}; run {effect.run or '-'}, {when})"
    )


def _overview(items: list[StoredMechanism]) -> Table:
    table = Table()
    for column in ("mechanism", "component", "status", "best effect", "deployment", "requires"):
        table.add_column(column, overflow="fold")
    for item in items:
        best = max((e for e in item.effects if e.outcome == "verified"), key=lambda e: e.low, default=None)
        table.add_row(
            escape(item.mechanism.name),
            escape(item.mechanism.component),
            item.status,
            f"{best.ratio:.2f}x \\[{best.low:.2f}, {best.high:.2f}]" if best else "-",
            escape(best.deployment) if best else "-",
            escape(", ".join(item.mechanism.requires)) or "-",
        )
    return table


class _Out:
    """Prints to whatever the terminal is when a command runs, not when the commands were built."""

    def print(self, what: object, **options: Any) -> None:
        """As `rich.console.Console.print`."""
        Console().print(what, **options)


class _clear:
    """Prints a store's error as one message and exits with its code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, MemoryError_):
            typer.echo(f"error: {error.message}" + (f"\n  hint: {error.hint}" if error.hint else ""), err=True)
            raise typer.Exit(error.exit_code)


def _open(url: str | None) -> MemoryStore:
    with _clear():
        return MemoryStore(url or default_url())
    raise AssertionError("unreachable: _clear leaves through typer.Exit")


app = make_app()
