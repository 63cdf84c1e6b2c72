"""`specpilot memory ...`: look into the store, move it, verify what it claims.

`make_app(loop)` builds the commands; the front door passes what the loop can do, so that `verify` recomputes
intervals, tries the patch on the shipped engine and, when asked, measures the mechanism again. Nothing here measures.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .database import default_url
from .errors import MemoryError_
from .recall import measured_by, merely_null
from .records import Effect, Mechanism, StoredMechanism
from .store import MemoryStore

NOT_CONFIRMED = 10
"""Exit code: the patch no longer fits, or the new measurement did not confirm the gain (docs/architecture.md)."""


class Loop(Protocol):
    """What `verify` needs from the loop, which the memory does not know."""

    def interval_problem(self, effect: Effect) -> str:
        """How an effect's stored interval differs from the one that its samples give; empty when it agrees."""
        ...

    def fit(self, chain: list[Mechanism]) -> tuple[bool | None, str]:
        """Whether the patches apply, one on top of the other, to the engine they name (None: not tried), in words."""
        ...

    def replay(self, chain: list[Mechanism], deployment: str, url: str) -> int:
        """Measures and gates the last of `chain` again, on the others; the outcome goes to the store. Exit code."""
        ...


Url = Annotated[
    str | None, typer.Option("--url", help="SQLAlchemy URL or path of the store.", envvar="SPECPILOT_MEMORY_URL")
]
RATIO_TOLERANCE = 1e-6
"""Relative difference allowed between a stored ratio and the geometric mean of its samples (order of summation)."""


def make_app(loop: Loop | None = None) -> typer.Typer:
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
        console.print(f"wrote {_count(count, 'mechanism')} to {escape(str(file))}")

    @app.command("import")
    def import_(file: Path, url: Url = None) -> None:
        """Merge FILE, written by `export`, into the store."""
        with _open(url) as store, _clear():
            mechanisms, effects = store.import_(file)
        console.print(f"{_count(mechanisms, 'new mechanism')}, {_count(effects, 'new effect')}")

    @app.command()
    def verify(
        name: str,
        url: Url = None,
        deployment: Annotated[str | None, typer.Option(help="Replay on this deployment only.")] = None,
        run: Annotated[bool, typer.Option("--run", "--replay", help="Measure and gate it again.")] = False,
    ) -> None:
        """Check the evidence of NAME: checksums, ratio and interval against the raw samples, patch against the engine.

        With --run the mechanism is also measured and gated again, on each deployment that it has an effect on (or on
        the one given), and the outcome is stored. Exit code 8: the evidence contradicts itself; 10: the patch no
        longer fits, or the gain was not confirmed. In both cases the mechanism is marked stale.
        """
        with _open(url) as store, _clear():
            stored, chain = store.get(name), store.with_requirements(name)
            problems = store.contradictions(name) + check_evidence(stored, loop)
            for line in _findings(stored, problems, "ratios and intervals" if loop else "ratios"):
                console.print(line, markup=False, soft_wrap=True)
            fits, words = loop.fit(chain) if loop else (None, "not tried: no loop behind this command")
            console.print(f"patch: {words}", markup=False, soft_wrap=True)
            _settle(store, stored, bool(problems) or fits is False)
        code = 8 if problems else NOT_CONFIRMED if fits is False else 0
        targets = replay_targets(stored, deployment)
        if not run:
            for target in targets:
                console.print(f"not measured again; --run would, on {target}", markup=False)
            raise typer.Exit(code)
        if loop is None:
            typer.echo("error: this command has no loop behind it\n  hint: use `specpilot memory verify`", err=True)
            raise typer.Exit(2)
        if fits is False:
            raise typer.Exit(code)
        codes = [loop.replay(chain, target, store.url) for target in targets]
        raise typer.Exit(code or next((code for code in codes if code), 0))

    return app


def replay_targets(stored: StoredMechanism, deployment: str | None) -> list[str]:
    """Deployments on which a replay would run: the given one, else each one with an effect."""
    return [deployment] if deployment else sorted({effect.deployment for effect in stored.effects})


def check_evidence(stored: StoredMechanism, loop: Loop | None = None) -> list[str]:
    """What in the stored evidence contradicts itself; empty when sound. Intervals are recomputed where a loop is given."""
    problems = []
    for effect in stored.effects:
        where = f"{effect.deployment} {effect.at:%Y-%m-%d}" if effect.at else effect.deployment
        if not effect.samples:
            problems.append(f"{where}: no raw samples behind {effect.ratio:.3f}x")
            continue
        mean = math.exp(sum(map(math.log, effect.samples)) / len(effect.samples))
        if abs(mean / effect.ratio - 1) > RATIO_TOLERANCE:
            problems.append(f"{where}: stored {effect.ratio:.3f}x, but its samples give {mean:.3f}x")
        elif loop and (problem := loop.interval_problem(effect)):
            problems.append(f"{where}: {problem}")
        if effect.outcome == "verified" and effect.gate.get("passed") is False:
            problems.append(f"{where}: called verified, but its gate did not pass")
        if effect.outcome == "verified" and effect.low <= 1.0:
            problems.append(f"{where}: called verified, but its interval begins at {effect.low:.3f}")
    return problems


def _findings(stored: StoredMechanism, problems: list[str], what: str) -> list[str]:
    """One line per thing that was checked, in words."""
    lines = [f"evidence: {problem}" for problem in problems]
    if not stored.effects:
        lines.append("evidence: no effect was ever recorded: the mechanism is unproven")
    elif not problems:
        lines.append(
            f"evidence: checksums match; {what} of {_count(len(stored.effects), 'effect')} follow from the raw samples"
        )
    return lines


def _settle(store: MemoryStore, stored: StoredMechanism, doubtful: bool) -> None:
    """`stale` while evidence or patch is doubtful; what the effects say again once it is not."""
    proven = "verified" if any(e.outcome == "verified" for e in stored.effects) else "refuted"
    wanted = "stale" if doubtful or not stored.effects else proven
    if wanted != stored.status:
        store.set_status(stored.mechanism.name, wanted)  # type: ignore[arg-type]
        typer.echo(f"marked {wanted} (it was {stored.status})")


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
        f"  patch: {_count(len(mechanism.patch.splitlines()), 'line')}, sha256 {mechanism.patch_sha256}",
    ]
    if mechanism.notes:
        lines.append(f"  notes: {mechanism.notes.strip()}")
    return lines + [_effect_line(effect) for effect in stored.effects]


def _effect_line(effect: Effect) -> str:
    length = ""
    if effect.accepted_length_before and effect.accepted_length_after:
        length = f", accepted length {effect.accepted_length_before:.2f} -> {effect.accepted_length_after:.2f}"
    outcome = "verified" if effect.outcome == "verified" else f"refuted: {effect.reason}"
    if merely_null(effect):
        outcome = "no effect that could be told from none"
    where = f"{effect.deployment} on {effect.hardware.name or effect.hardware.hardware_class}"
    when = f"{effect.at:%Y-%m-%d %H:%M} UTC" if effect.at else "no date"
    return (
        f"  effect: {effect.ratio:.3f}x [{effect.low:.3f}, {effect.high:.3f}] over {_count(len(effect.samples), 'pair')}, {where}"
        f"{length}{_component_time(effect)} ({outcome}; {measured_by(effect)}, {when})"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _component_time(effect: Effect) -> str:
    """Predicted beside realised time of the component, as far as they are known; else nothing."""
    if effect.predicted_ms is None and effect.realised_ms is None:
        return ""
    shown = ["?" if value is None else f"{value:.2f}" for value in (effect.predicted_ms, effect.realised_ms)]
    return f", component predicted {shown[0]} ms a round, realised {shown[1]}"


def _milliseconds(effect: Effect | None) -> str:
    if effect is None or (effect.predicted_ms is None and effect.realised_ms is None):
        return "-"
    return " / ".join("?" if v is None else f"{v:.1f}" for v in (effect.predicted_ms, effect.realised_ms))


def _overview(items: list[StoredMechanism]) -> Table:
    table = Table()
    for column in (
        "mechanism",
        "component",
        "status",
        "best effect",
        "ms predicted / realised",
        "deployment",
        "requires",
    ):
        table.add_column(column, overflow="fold")
    for item in items:
        best = max((e for e in item.effects if e.outcome == "verified"), key=lambda e: e.low, default=None)
        table.add_row(
            escape(item.mechanism.name),
            escape(item.mechanism.component),
            item.status,
            f"{best.ratio:.2f}x \\[{best.low:.2f}, {best.high:.2f}]" if best else "-",
            _milliseconds(best),
            escape(best.deployment) if best else "-",
            escape(", ".join(item.mechanism.requires)) or "-",
        )
    return table


class _Out:
    """Prints to whatever the terminal is when a command runs, not when the commands were built."""

    def print(self, what: object, **options: Any) -> None:
        """As `rich.console.Console.print`."""
        found = Console()
        # In a pipe or file nobody looks at columns, but somebody may look for a name.
        (found if found.is_terminal else Console(width=200)).print(what, **options)


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
