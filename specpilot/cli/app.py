"""The command tree, and how every error becomes one message and one exit code."""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specpilot import __version__
from specpilot.cli import (
    attempt,
    deployments,
    doctor,
    export,
    fetch,
    maintenance,
    memory,
    optimize,
    roofline,
    status,
    w12,
)
from specpilot.errors import DiskFullError, EnvironmentProblem, SpecPilotError, is_disk_full
from specpilot.paths import logs_dir


class FrontDoor(TyperGroup):
    """The command group; ends the process with the exit code that the error stands for."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted; `specpilot resume latest` goes on where a run stopped", err=True)
            raise SystemExit(130) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        except SpecPilotError as error:
            raise SystemExit(complain(error)) from error
        except Exception as error:
            if type(error).__module__.startswith(("typer.", "click.")):
                raise  # usage errors and Exit: typer prints them
            raise SystemExit(complain(_named(error))) from error


app = typer.Typer(
    cls=FrontDoor,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Find the fastest speculative-decoding engine for your machine that emits exactly the target's tokens.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specpilot {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


for module in (optimize, status, maintenance, export, roofline, fetch, doctor, w12):
    module.register(app)
app.add_typer(deployments.app, name="deployments")
app.add_typer(attempt.app, name="attempt")
memory.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Always ends in `SystemExit`."""
    app(args=None if arguments is None else list(arguments), prog_name="specpilot")


_UNUSABLE = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE)


def complain(error: SpecPilotError) -> int:
    """Print an error as one message on standard error; returns the exit code."""
    typer.echo(f"error: {error.message}", err=True)
    if error.hint:
        typer.echo(f"  what to do: {error.hint}", err=True)
    return error.exit_code


def _named(error: Exception) -> SpecPilotError:
    """An error of ours for any exception: those of rooms that do not know our base class, then the unexpected."""
    if is_disk_full(error):
        return DiskFullError(f"no space left on the disk ({error})", "free some space, then `specpilot resume latest`.")
    code = getattr(error, "exit_code", None)
    message = getattr(error, "message", None)
    if type(error).__name__ == "CostModelError":
        code, message = 2, str(error)
    if isinstance(code, int) and message:
        known = SpecPilotError(str(message), str(getattr(error, "hint", "")))
        known.exit_code = code  # type: ignore[misc]
        return known
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("specpilot"):
        missing = SpecPilotError(
            f"the Python package {error.name!r} is not installed",
            "pip install 'specpilot[engine]' in this environment.",
        )
        missing.exit_code = 3  # type: ignore[misc]
        return missing
    if scarce := _scarce(error):
        return EnvironmentProblem(
            f"{scarce} ({type(error).__name__}: {str(error)[:200]})",
            f"see `ulimit -a`, then `specpilot resume latest`. Details: {_write_traceback(error) or 'none'}.",
        )
    unusable = isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError | FileNotFoundError)
    if isinstance(error, OSError) and (unusable or error.errno in _UNUSABLE) and error.filename:
        return EnvironmentProblem(
            f"{error.filename}: {error.strerror}",
            f"check that folder and its permissions; SPECPILOT_HOME says where runs are kept. Details: {_write_traceback(error) or 'none'}.",
        )
    where = _write_traceback(error)
    return SpecPilotError(
        f"unexpected {type(error).__name__}: {str(error)[:300]}",
        f"this is a defect of SpecPilot; the details are in {where}."
        if where
        else "details follow nowhere: the log folder is not writable.",
    )


def _scarce(error: Exception) -> str:
    """What this process may not have more of, in words; empty if `error` is about something else."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "no memory left for this process"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too few files may be open at once"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "files may not grow that large"
    if "can't start new thread" in str(error) or isinstance(error, BlockingIOError):  # fork: EAGAIN
        return "no further thread or process may be started"
    return ""


def _write_traceback(error: Exception) -> Path | None:
    try:
        folder = logs_dir()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        text = "".join(traceback.format_exception(error))
        path.write_text(f"specpilot {__version__}\narguments: {sys.argv[1:]}\n\n{text}", encoding="utf-8")
        return path
    except (OSError, SpecPilotError):
        return None
