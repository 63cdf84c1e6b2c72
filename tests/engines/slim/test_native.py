"""Native builds: kept once, told when they fail, and never opened where the file is not whole."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slim_engine import native

from tests.engines.slim.conftest import TREE

CHILD = """
import sys
from slim_engine.native import load_native
print(load_native([sys.argv[1]]).seven())
"""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library as `load_native` leaves it, of a function that says 7, not loaded in this process."""
    monkeypatch.setenv("SLIM_NATIVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "seven.cpp").write_text('static int table[4096] = {7}; extern "C" int seven() { return table[0]; }')
    assert _seven(tmp_path) == "7"
    (library,) = (tmp_path / "cache").iterdir()
    return library


def _seven(folder: Path) -> str:
    """What the library says in a process of its own, which a broken one may kill."""
    command = [sys.executable, "-c", CHILD, str(folder / "seven.cpp")]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return done.stdout.strip()


@needs_compiler
def test_a_library_that_was_cut_off_is_built_again(kept: Path, tmp_path: Path) -> None:
    good = kept.read_bytes()
    for length in (0, 1, 32, 64, 1000, 4096, len(good) // 2, len(good) - 1000, len(good) - 33, len(good) - 1):
        kept.write_bytes(good[:length])
        assert not native.whole(kept)
        assert _seven(tmp_path) == "7", f"cut off at {length} of {len(good)} bytes"
        assert native.whole(kept), "mended for the next start"


@needs_compiler
@pytest.mark.parametrize("damage", ["zeros", "one bit", "holes"])
def test_a_library_that_was_overwritten_is_built_again(kept: Path, tmp_path: Path, damage: str) -> None:
    data = bytearray(kept.read_bytes())
    if damage == "one bit":
        data[len(data) // 3] ^= 1
    else:  # blocks that never reached the disk
        start = 0 if damage == "zeros" else 4096
        data[start:] = bytes(len(data) - start)
    kept.write_bytes(data)
    assert not native.whole(kept)
    assert _seven(tmp_path) == "7"


@needs_compiler
def test_a_whole_library_is_not_built_again(kept: Path, tmp_path: Path) -> None:
    before = kept.stat()
    assert _seven(tmp_path) == "7"
    after = kept.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert ctypes.CDLL(str(kept)).seven() == 7, "what lies behind the library does not disturb a loader"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "nothing half done"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIM_NATIVE_CACHE", str(tmp_path / "file"))
    (tmp_path / "seven.cpp").write_text("")
    with pytest.raises(
        native.NativeBuildError, match="cannot be kept or loaded.*set SLIM_NATIVE_CACHE|no C.. compiler"
    ):
        native.load_native([tmp_path / "seven.cpp"])
