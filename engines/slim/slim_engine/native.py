"""Compiles C++ sources into a shared library and loads it with ctypes. Unused by the stock engine; mechanisms share it.

The library is keyed by the sources, the flags, the compiler and the processor, so a cache folder may be shared or moved: a library is
never loaded on a machine, or for a source, that it was not built for. Its last bytes are the digest of all before them: one that is not whole
(the power went, the disk was full, a copy was cut off) would end the process in the loader or, worse, later, so it is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slim_engine.errors import SlimError
from slim_engine.tunables import TREE

NATIVE = TREE / "native"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
_DIGEST = hashlib.sha256().digest_size


class NativeBuildError(SlimError):
    """No compiler, or it refused the source. The message holds the compiler's own words."""


def load_native(sources: Sequence[str | Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Builds `sources` (names inside native/, or paths) once and loads the result.

    `flags` are added to FLAGS. Raises NativeBuildError.
    """
    paths = [Path(s) if Path(s).is_absolute() else NATIVE / s for s in sources]
    for path in paths:
        if not path.is_file():
            raise NativeBuildError(f"native source {path} does not exist")
    compiler = _compiler()
    command = [compiler, *FLAGS, *flags]
    try:
        library = cache_folder() / f"{_key(paths, command)}.so"
        if not whole(library):
            _build(paths, command, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeBuildError(f"the native library cannot be kept or loaded: {error}; set SLIM_NATIVE_CACHE") from error


def whole(library: Path) -> bool:
    """Whether a file is a library as `load_native` leaves it, to the last byte."""
    try:
        data = library.read_bytes()
    except FileNotFoundError:
        return False
    return len(data) > _DIGEST and hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def cache_folder() -> Path:
    """`$SLIM_NATIVE_CACHE`, else a folder in the temporary directory that only this user may write."""
    named = os.environ.get("SLIM_NATIVE_CACHE")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"slim-native-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not named and (folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
        raise NativeBuildError(f"{folder} is not owned by this user alone: remove it or set SLIM_NATIVE_CACHE")
    return folder


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
    raise NativeBuildError(f"no C++ compiler found ({wanted or 'g++, clang++, c++'}): install g++ or set CXX")


def _key(paths: Sequence[Path], command: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes() + b"\0")
        for header in sorted(path.parent.glob("*.h*")):
            digest.update(header.read_bytes() + b"\0")
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    processor = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    digest.update("\0".join([*command, version, *processor]).encode())
    return digest.hexdigest()[:32]


def _seal(library: Path) -> None:
    """Puts the digest behind a library, where no loader looks, and all of it on the disk."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _build(paths: Sequence[Path], command: Sequence[str], library: Path) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, *map(str, paths), "-o", temporary], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise NativeBuildError(f"{command[0]} failed on {', '.join(p.name for p in paths)}:\n{done.stderr[-4000:]}")
        _seal(Path(temporary))
        os.replace(temporary, library)  # atomic: two processes may build the same library at once
    finally:
        Path(temporary).unlink(missing_ok=True)
