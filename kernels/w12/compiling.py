"""Compile kernels into a shared library once, and keep it. Nothing happens on import.

A library's name holds a digest of sources, flags and compiler, so a changed source is compiled again and a cache folder
never serves what was made otherwise. $SPECPILOT_CACHE names the folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specpilot.kernels.w12.errors import MachineProblem


def cache_folder() -> Path:
    """Where compiled kernels are kept: $SPECPILOT_CACHE/w12, else `specpilot/w12` in the user's cache folder."""
    chosen = os.environ.get("SPECPILOT_CACHE")
    if chosen:
        return Path(chosen) / "w12"
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
    command) when it fails, or when the folder cannot be written.
    """
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((list(command[1:]), version, made_for)).encode())
    for path in sorted(sources):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    try:
        folder = folder or cache_folder()
        library = folder / f"{name}-{digest.hexdigest()[:16]}.so"
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: two processes may compile at once.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            words = [*command, *map(str, units), "-o", str(made)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise MachineProblem(
                    f"{command[0]} could not compile {name}:\n{done.stderr[-3000:]}",
                    hint or f"run it by hand: {' '.join(words[:-2])}",
                )
            library.with_suffix(".log").write_text(done.stderr)
            made.replace(library)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise MachineProblem(f"compiled kernels cannot be kept: {error}", "set SPECPILOT_CACHE to a folder.") from error
    return library
