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

from .container.checkpoint import pack, unpack
from .container.policy import MAX_ESCAPE_RATE
from .errors import W12Error


def main() -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m specpilot.kernels.w12")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "unpack"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--to", type=Path, required=True)
        if name == "pack":
            command.add_argument("--row-block", choices=("auto", "none", "64", "128"), default="auto")
            command.add_argument("--max-escape-rate", type=float, default=MAX_ESCAPE_RATE)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)  # so that the unfinished folder is removed
    try:
        if given.command == "pack":
            report = pack(
                given.folder, given.to, row_block=given.row_block, max_escape_rate=given.max_escape_rate, progress=_tell
            )
            print(json.dumps(report.as_dict()))
        else:
            print(json.dumps({"weights_sha256": unpack(given.folder, given.to, progress=_tell)}))
    except W12Error as error:
        print(f"error: {error.message}" + (f"\n  what to do: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"interrupted; nothing is left of {given.to}", file=sys.stderr)
        return 130
    return 0


def _tell(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
