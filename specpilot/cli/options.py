"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specpilot.deployment import Deployment, find_deployment, load_deployment

DeploymentName = Annotated[
    str, typer.Option("--deployment", "-d", help="Name of a bundled deployment, or path of a deployment.yaml.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change one key; may be repeated.")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run id, path of a run folder, or `latest`.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines of text instead of the live view.")]


def load(name: str, overrides: list[str] | None = None) -> tuple[Deployment, Path]:
    """The deployment and its file."""
    path = find_deployment(name)
    return load_deployment(path, overrides or ()), path


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def folder_size(folder: Path) -> int:
    """Bytes in a folder; files that vanish meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
