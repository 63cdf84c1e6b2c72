"""`python -m specpilot.kernels.w12 pack|unpack`: the commands, in a process of the data plane.

`specpilot pack` starts this, so that the control plane needs no torch and the format has one implementation. Results go
to standard output as one JSON object, progress and errors to standard error; the exit code is the command's.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from .errors import W12Error

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run one command; returns the exit code."""
    for number in _ENDING:
        signal.signal(number, _interrupt)  # so that the unfinished folder is removed
    given = _parser().parse_args()
    try:
        print(json.dumps(_run(given)))
    except W12Error as error:
        print(f"error: {error.message}" + (f"\n  what to do: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        left = "" if given.to.exists() else f"; nothing is left of {given.to}"
        print(f"interrupted{left}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specpilot.kernels.w12")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "unpack"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--to", type=Path, required=True)
        if name == "pack":
            command.add_argument("--row-block", choices=("auto", "none", "64", "128"), default="auto")
            command.add_argument("--max-escape-rate", type=float)
    return parser


def _run(given: argparse.Namespace) -> dict[str, object]:
    from .container import checkpoint, policy  # imports torch, which takes seconds: an interrupt must find us ready

    if given.command == "unpack":
        return {"weights_sha256": checkpoint.unpack(given.folder, given.to, progress=_tell)}
    rate = policy.MAX_ESCAPE_RATE if given.max_escape_rate is None else given.max_escape_rate
    report = checkpoint.pack(given.folder, given.to, row_block=given.row_block, max_escape_rate=rate, progress=_tell)
    return report.as_dict()


def _tell(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, _ignore)  # Ctrl-C reaches us twice, once through `specpilot`: once is enough
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN it also takes a signal that has come already and waits for its handler."""


if __name__ == "__main__":
    sys.exit(main())
