"""What packing and unpacking refuse, with the exit code of the command (the same codes as everywhere in SpecPilot)."""

from __future__ import annotations

from typing import ClassVar


class W12Error(Exception):
    """Base. `message`: what was wrong and where; `hint`: what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadRequest(W12Error):
    """An argument cannot be used: the output folder exists, for one."""

    exit_code = 2


class MachineProblem(W12Error):
    """The machine lacks something: space, permission, a compiler."""

    exit_code = 3


class BadCheckpoint(W12Error):
    """A checkpoint, packed or not, is missing, damaged, truncated or of another version."""

    exit_code = 4
