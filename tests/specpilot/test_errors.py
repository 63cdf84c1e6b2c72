"""Exit codes are a promise to scripts; disk-full is recognised wherever it comes from."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from specpilot import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SpecPilotError, 1),
        (errors.UsageError, 2),
        (errors.EnvironmentProblem, 3),
        (errors.DiskFullError, 3),
        (errors.MissingToolError, 3),
        (errors.MissingModelError, 4),
        (errors.DigestError, 4),
        (errors.RunFolderError, 5),
        (errors.RunLockedError, 5),
        (errors.GateUnsoundError, 7),
        (errors.TamperedEvidenceError, 8),
        (errors.InfrastructureError, 9),
    ],
)
def test_exit_codes_follow_the_architecture_page(kind: type[errors.SpecPilotError], code: int) -> None:
    error = kind("what", "do this")
    assert error.exit_code == code
    assert str(error) == "what\n  do this"


def test_disk_full_is_found_behind_other_errors(tmp_path: Path) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as cause:
            raise RuntimeError("wrapped") from cause
    except RuntimeError as error:
        assert errors.is_disk_full(error)
    assert errors.is_disk_full(sqlite3.OperationalError("database or disk is full"))
    assert not errors.is_disk_full(OSError(errno.EACCES, "Permission denied"))


def test_disk_full_named_translates_only_disk_full(tmp_path: Path) -> None:
    with pytest.raises(errors.DiskFullError, match=str(tmp_path)) as caught:
        with errors.disk_full_named(tmp_path):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
    assert "resume" in caught.value.hint
    with pytest.raises(PermissionError):
        with errors.disk_full_named(tmp_path):
            raise PermissionError("no")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_is_recognised() -> None:
    with pytest.raises(errors.DiskFullError):
        with errors.disk_full_named("/dev/full"):
            with open("/dev/full", "w") as file:
                file.write("x")
                file.flush()
