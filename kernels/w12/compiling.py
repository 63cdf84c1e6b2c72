"""Compile kernels into a shared library once, and keep it. Nothing happens on import.

A library's name holds a digest of sources, flags and compiler, so a changed source is compiled again and a cache folder
never serves what was made otherwise. $SPECPILOT_CACHE names the folder. A library's last bytes are the digest of all before
them: one that is cut off or overwritten can end the process in the loader, so it is not even opened.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from specpilot.kernels.w12.errors import MachineProblem

_DIGEST = hashlib.sha256().digest_size
LONGEST_S = 600
"""Seconds after which a compiler is taken to hang."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: $SPECPILOT_CACHE/w12, else `specpilot/w12` in the user's cache folder."""
    chosen = os.environ.get("SPECPILOT_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "w12"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specpilot" / "w12"


def compiled(
    name: str,
    command: Sequence[str],
    sources: Sequence[Path],
    units: Sequence[Path],
    *,
    made_for: str = "",
    folder: Path | None = None,
    hint: str = "",
) -> Path:
    """The library that `command` (compiler and flags) makes of `units`; compiled unless it lies in `folder` already.

    sources: every file that counts, `units` and what they include. made_for: what the flags do not say of the target, such
    as the processor behind -march=native. Raises MachineProblem with the compiler's words and `hint` (by default the
    command) when it fails, cannot be run or hangs, or when the folder cannot be written.
    """
    version = _run([command[0], "--version"]).stdout
    digest = hashlib.sha256(repr((list(command[1:]), version, made_for)).encode())
    for path in sorted(sources):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    try:
        folder = folder or cache_folder()
        library = folder / f"{name}-{digest.hexdigest()[:16]}.so"
        if whole(library):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: two processes may compile at once.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            words = [*command, *map(str, units), "-o", str(made)]
            done = _run(words)
            if done.returncode:
                raise MachineProblem(
                    f"{command[0]} could not compile {name}:\n{done.stderr[-3000:]}",
                    hint or f"run it by hand: {' '.join(words[:-2])}",
                )
            library.with_suffix(".log").write_text(done.stderr, encoding="utf-8")
            _seal(made)
            made.replace(library)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise MachineProblem(f"compiled kernels cannot be kept: {error}", "set SPECPILOT_CACHE to a folder.") from error
    return library


def whole(library: Path) -> bool:
    """Whether a file is a library as `compiled` leaves it, to the last byte."""
    try:
        data = library.read_bytes()
    except FileNotFoundError:
        return False
    return len(data) > _DIGEST and hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _seal(library: Path) -> None:
    """Put the digest behind a library, where no loader looks, and all of it on the disk."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def loaded(make: Callable[[], Path]) -> ctypes.CDLL:
    """The library that `make` (a call of `compiled`) keeps; one that cannot be loaded is compiled again, once.

    Raises MachineProblem when that one cannot be loaded either.
    """
    library = make()
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # of another machine, or without a library it needs: the flags do not say everything
        try:
            library.unlink(missing_ok=True)
            return ctypes.CDLL(str(make()))
        except OSError as error:
            raise MachineProblem(f"compiled kernels cannot be loaded: {error}", f"delete {library.parent}.") from error


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler, with what it prints. Raises MachineProblem when it cannot be run, or hangs."""
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise MachineProblem(
            f"{words[0]} was still at work after {LONGEST_S} s", f"run it by hand: {' '.join(words)}"
        ) from error
    except OSError as error:
        raise MachineProblem(
            f"{words[0]} cannot be run: {error.strerror or error}", "name another compiler."
        ) from error
