"""`specpilot pack` and `specpilot unpack`: checkpoints with their BF16 weights in twelve bits, losslessly.

The work is done by `python -m specpilot.kernels.w12` in a process of its own: the format is defined once, in torch, and
this side has none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import specpilot
from specpilot.cli.options import size_text
from specpilot.cli.tables import console
from specpilot.errors import EnvironmentProblem, SpecPilotError, UsageError

To = Annotated[Path, typer.Option("--to", help="Folder to write; must not exist.")]


class RowBlock(StrEnum):
    """How many rows share an exponent base."""

    auto = "auto"
    none = "none"
    b64 = "64"
    b128 = "128"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("pack")(pack)
    app.command("unpack")(unpack)


def pack(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with *.safetensors, config.json and the rest.")],
    to: To,
    row_block: Annotated[
        RowBlock,
        typer.Option(help="Rows per exponent base; auto: one base unless 64 rows more than halve the escapes."),
    ] = RowBlock.auto,
    max_escape_rate: Annotated[
        float, typer.Option(help="Matrices with more escapes per weight stay BF16 (0 to 1).")
    ] = 0.002,
    report: Annotated[Path | None, typer.Option(help="Also write the report to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Store the BF16 matrices of a checkpoint in 12 bits a weight, losslessly.

    A PyTorch model is filled from the new folder by specpilot.kernels.w12.load.load_packed, its layers in 12 bits;
    for anything else, `unpack` gives back the same files.
    """
    if report is not None and report.exists():
        raise UsageError(f"{report} exists", "give another file as --report.")
    if report is not None and not report.parent.is_dir():
        raise UsageError(f"{report.parent} is not a folder", "make it, or give another file as --report.")
    options = ["--row-block", str(row_block), "--max-escape-rate", str(max_escape_rate)]
    found = _data_plane("pack", checkpoint, to, options)
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found))
        return
    out = console()
    out.print(_table(found["tensors"]))
    before, after = found["original_bytes"], found["packed_bytes"]
    out.print(
        f"{to}: weights {size_text(before)} -> {size_text(after)} ({after / max(1, before):.1%}); "
        f"weights sha256 {found['weights_sha256']}",
        soft_wrap=True,
    )


def unpack(folder: Annotated[Path, typer.Argument(help="Folder that `specpilot pack` wrote.")], to: To) -> None:
    """Give back the checkpoint that was packed, file for file the same bytes."""
    found = _data_plane("unpack", folder, to, [])
    typer.echo(f"{to}: every tensor and file matches its checksum; weights sha256 {found['weights_sha256']}")


def _data_plane(command: str, folder: Path, to: Path, options: list[str]) -> dict[str, Any]:
    """Run it; its words go to our standard error as they come. Ends the process with its exit code if it fails."""
    for needed in ("torch", "safetensors"):
        if find_spec(needed) is None:
            raise EnvironmentProblem(
                f"the Python package {needed!r} is not installed",
                "pip install 'specpilot[engine]' in this environment.",
            )
    root = str(Path(specpilot.__file__).parents[1])  # this very installation, wherever the command was started
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-P", "-m", "specpilot.kernels.w12", command, str(folder), "--to", str(to), *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as child:
        try:
            out, _ = child.communicate()
        except BaseException as error:
            child.terminate()  # it removes its unfinished folder, and says so
            child.wait()
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(130) from None
            raise
    if child.returncode:
        if child.returncode < 0:
            raise SpecPilotError(
                f"`{command}` was killed by signal {-child.returncode}", "the machine may be out of memory; try again."
            )
        raise typer.Exit(child.returncode)
    return dict(json.loads(out))


def _table(tensors: list[dict[str, Any]]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("stored")
    table.add_column("rows/base", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("escapes", justify="right")
    for t in tensors:
        stored = "w12" if t["packed"] else f"{t['dtype']}: {t['reason']}"
        block = ("all" if t["row_block"] is None else str(t["row_block"])) if t["packed"] else ""
        rate = f"{t['escape_rate']:.4%}" if t["packed"] else ""
        shape = "x".join(map(str, t["shape"])) or "scalar"
        table.add_row(escape(t["name"]), shape, escape(stored), block, f"{t['bits_per_weight']:.3f}", rate)
    return table
