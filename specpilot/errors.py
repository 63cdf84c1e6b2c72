"""Errors that a user sees: what was wrong, where, and what to do, with the exit code of the command.

Exit codes: 0 ok, 1 internal, 2 invalid input, 3 environment, 4 model or digest, 5 run locked or run
folder unusable, 7 gate unsound, 8 tampered evidence, 9 infrastructure, 10 not accepted (an attempt was rejected, a
mechanism not confirmed), 130 Ctrl-C. A run that ends because its budget is spent is complete. This module imports nothing of ours.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class SpecPilotError(Exception):
    """Base of every error we raise on purpose.

    `message` says what was wrong and where, `hint` says what to do. `exit_code` is the command's status.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if not self.hint else f"{self.message}\n  {self.hint}"


class UsageError(SpecPilotError):
    """Invalid input: a deployment file, an argument, a key."""

    exit_code = 2


class EnvironmentProblem(SpecPilotError):
    """The machine lacks something: git, a compiler, a free port, permissions."""

    exit_code = 3


class DiskFullError(EnvironmentProblem):
    """No space left where we must write."""


class MissingToolError(EnvironmentProblem):
    """A program that we need is not installed."""


class ModelError(SpecPilotError):
    """A checkpoint cannot be used."""

    exit_code = 4


class MissingModelError(ModelError):
    """A checkpoint is not there and cannot be fetched."""


class DigestError(ModelError):
    """A file is not the one that the deployment pins."""


class RunFolderError(SpecPilotError):
    """A run folder is missing, damaged, or belongs to something else."""

    exit_code = 5


class RunLockedError(RunFolderError):
    """Another process is working on this run."""


class GateUnsoundError(SpecPilotError):
    """The gate failed its own test, so no verdict of it may be trusted."""

    exit_code = 7


class TamperedEvidenceError(SpecPilotError):
    """Stored evidence does not match its digest."""

    exit_code = 8


class InfrastructureError(SpecPilotError):
    """Measuring failed for a reason that says nothing about the candidate. Never a score."""

    exit_code = 9


NOT_ACCEPTED = 10
"""Exit code of a command that worked, and whose answer is no: the gate or the measurement refused a change."""

ROOM_BYTES = 256 << 10
"""Below this much free space a failed write is blamed on the disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException) -> bool:
    """True if `error` (or what caused it) means that the disk or the quota is exhausted."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and (seen.errno in _FULL or "No space left on device" in str(seen)):
            return True  # the text: shutil.Error collects failures without an errno
        if isinstance(seen, sqlite3.Error) and "disk is full" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def nothing_free(where: Path | str) -> bool:
    """True if the disk that holds `where` (or will hold it) has no room for even a small file.

    Programs and libraries often say only that they could not write; then this tells why.
    """
    path = Path(where)
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    try:
        room = shutil.disk_usage(existing) if existing is not None else None
        return room is not None and room.total > 0 and room.free < ROOM_BYTES  # /proc and the like have no size
    except OSError:
        return False


@contextmanager
def disk_full_named(where: Path | str) -> Iterator[None]:
    """Turn "no space left" raised inside the block into a `DiskFullError` that names `where`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if not is_disk_full(error) and not nothing_free(where):
            raise
        raise DiskFullError(
            f"no space left on the disk that holds {where}",
            "free some space there (`specpilot gc` lists what old runs hold), then `specpilot resume`: "
            "finished steps are kept.",
        ) from error
