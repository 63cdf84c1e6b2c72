"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from specpilot.errors import (
    DiskFullError,
    EnvironmentProblem,
    SpecPilotError,
    UsageError,
    disk_full_named,
    is_disk_full,
)

FULL_BYTES = 1 << 20
"""A failure with less free space than this is a failure for lack of space."""


@contextmanager
def staged(to: Path) -> Iterator[Path]:
    """A scratch folder beside `to` that takes its place when the block ends well, and is removed when it does not.

    Raises `UsageError` when `to` exists and is not an empty folder, `EnvironmentProblem` when it cannot be made,
    `DiskFullError`. What a killed export left beside `to` is removed.
    """
    to = to.absolute()
    _need_empty(to)
    with disk_full_named(to.parent):
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(to)
            scratch = to.with_name(f".{to.name}.part-{os.getpid()}")
            scratch.mkdir()
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise EnvironmentProblem(
                f"cannot write to {to.parent}: {error.strerror}", "choose another --to."
            ) from error
        try:
            yield scratch
            _need_empty(to)
            os.replace(scratch, to)
        except BaseException as error:
            full = shutil.disk_usage(to.parent).free < FULL_BYTES
            shutil.rmtree(scratch, ignore_errors=True)
            if full and isinstance(error, SpecPilotError) and not is_disk_full(error):
                # Programs that we call (git) word a full disk in many ways; the disk itself tells.
                raise DiskFullError(
                    f"no space left on the disk that holds {to.parent}", "free some space there, then export again."
                ) from error
            raise


def _need_empty(to: Path) -> None:
    if to.is_symlink() or (to.exists() and not to.is_dir()) or (to.is_dir() and any(to.iterdir())):
        raise UsageError(f"{to} exists and is not an empty folder", "give a new folder as --to.")


def _remove_leftovers(to: Path) -> None:
    for path in to.parent.glob(f".{to.name}.part-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(path, ignore_errors=True)
