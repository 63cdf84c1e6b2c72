"""What a confined command sees of the machine, when bubblewrap is present and usable.

Everything read-only but the folders it was given; `/tmp`, `/dev/shm` and the folder of services' sockets its own and empty;
no other process; no disk and no kernel setting, for root either. The network it shares. May import nothing of ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

MIB = 1 << 20

# Root keeps its capabilities unless told otherwise, and could then mount the read-only file system writable again.
_BASE = "--die-with-parent --unshare-pid --unshare-ipc --unshare-uts --cap-drop ALL --ro-bind / / --proc /proc".split()
_SERVICES = ("/run", "/var/run")
"""Where services have their sockets: who may use a container daemon's owns the machine."""
_DRIVERS = ("/run/nvidia", "/run/opengl-driver")
"""Libraries of graphics drivers, where an operator or NixOS puts them."""
_ACCELERATORS = ("nvidia*", "dri", "kfd", "accel", "infiniband")


@cache
def bubblewrap() -> str | None:
    """Path of a bubblewrap that works here, else None. Tried once; `SPECPILOT_BWRAP=0` turns it off."""
    path = shutil.which("bwrap")
    if path is None or os.environ.get("SPECPILOT_BWRAP") == "0":
        return None
    probe = [path, *_BASE, *_devices(path, MIB), *_private(path, MIB), "true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=10, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if done.returncode == 0 else None


@cache
def _sizes(program: str) -> bool:
    """True if this bubblewrap can bound a folder in memory (0.7 and newer)."""
    try:
        told = subprocess.run(
            [program, "--help"], capture_output=True, timeout=10, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"--size " in told.stdout + told.stderr


def _memory_folder(program: str, path: str, size: int) -> list[str]:
    """An empty folder in memory. Its files belong to no process, so only its own size bounds them."""
    return [*(["--size", str(size)] if _sizes(program) else []), "--tmpfs", path]


def _devices(program: str, shared: int) -> list[str]:
    """A small `/dev` with shared memory of its own (`shared` bytes), and the accelerators. All of `/dev` would hand root the disks."""
    words = ["--dev", "/dev"]
    for pattern in _ACCELERATORS:
        for path in sorted(Path("/dev").glob(pattern)):
            words += ["--dev-bind", str(path), str(path)]
    words += [*_memory_folder(program, "/dev/shm", shared), "--remount-ro", "/dev"]
    if os.geteuid() == 0:  # the kernel's settings belong to root, capabilities or not
        words += ["--ro-bind-try", "/proc/sys", "/proc/sys"]
        words += ["--ro-bind", "/dev/null", "/proc/sysrq-trigger"] if os.path.exists("/proc/sysrq-trigger") else []
    return words


def _private(program: str, size: int) -> list[str]:
    """A `/tmp` of its own (`size` bytes), and no socket of a service but what lies elsewhere."""
    words = _memory_folder(program, os.path.realpath("/tmp"), size)
    for path in sorted({os.path.realpath(name) for name in _SERVICES}):
        words += _memory_folder(program, path, MIB) if os.path.isdir(path) else []
    for path in filter(os.path.isdir, _DRIVERS):
        words += ["--ro-bind", path, path]
    return words


def confined_command(
    command: Sequence[str],
    cwd: Path,
    writable: Iterable[Path],
    readable: Iterable[Path],
    hidden: Iterable[Path],
    memory_bytes: int,
) -> list[str]:
    """`command` inside bubblewrap when that works, else unchanged."""
    program = bubblewrap()
    if program is None:
        return list(command)
    half = max(memory_bytes // 2, MIB)
    words = [program, *_BASE, *_devices(program, half), *_private(program, half)]
    private = [Path(os.path.realpath(name)) for name in ("/tmp", *_SERVICES)]
    named = [Path(word) for word in command if word.startswith("/")] + [cwd, *readable]
    named += [Path(sys.prefix), Path(sys.base_prefix), Path(command[0]).parent.parent]  # a venv of the engine's own
    for path in dict.fromkeys(named):
        # These are private, so what the command was told to read there must be shown to it.
        if path.exists() and path not in private and any(path.is_relative_to(one) for one in private):
            words += ["--ro-bind", str(path), str(path)]
    for path in writable:
        words += ["--bind", str(path), str(path)]
    for path in hidden:
        if path.is_dir():
            words += _memory_folder(program, str(path), MIB)
        elif path.exists():
            words += ["--ro-bind", "/dev/null", str(path)]
    return [*words, "--chdir", str(cwd), "--", *command]
