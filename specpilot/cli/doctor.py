"""`specpilot doctor`: does this machine have what a run needs? Changes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import psutil
import typer

from specpilot.bubblewrap import bubblewrap
from specpilot.cli.options import size_text
from specpilot.cores import usable_cores
from specpilot.paths import home

GIB = 1 << 30
Line = tuple[str, str, str]
"""Level (`ok`, `warn`, `bad`), subject, words."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor() -> None:
    """Check git, compiler, sandbox, packages, memory, threads and disk. Exit code 3 if a run cannot work."""
    checks: list[Callable[[], Line]] = [_python, _git, _compiler, _bubblewrap, _engine, _memory, _threads, _disk]
    lines = [check() for check in checks]
    for level, subject, words in lines:
        typer.echo(f"{level:<5}{subject:<12}{words}")
    if any(level == "bad" for level, _, _ in lines):
        raise typer.Exit(3)


def _python() -> Line:
    version = ".".join(map(str, sys.version_info[:3]))
    return ("ok" if sys.version_info >= (3, 11) else "bad", "python", f"{version} at {sys.executable}")


def _git() -> Line:
    path = shutil.which("git")
    if path is None:
        return ("bad", "git", "not found: install git 2.30 or newer")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
    return ("ok", "git", done.stdout.strip())


def _compiler() -> Line:
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if path is None:
        return ("warn", "compiler", "no g++: native mechanisms will be rejected at start; the rest works")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
    return ("ok", "compiler", (done.stdout.splitlines() or [path])[0])


def _bubblewrap() -> Line:
    path = bubblewrap()
    if path is None:
        return (
            "warn",
            "sandbox",
            "no usable bubblewrap: candidates can reach files that you can (see specpilot/sandbox.py)",
        )
    return ("ok", "sandbox", f"bubblewrap at {path}")


def _engine() -> Line:
    missing = [name for name in ("torch", "safetensors", "fastapi", "uvicorn") if util.find_spec(name) is None]
    if missing:
        return (
            "warn",
            "engine",
            f"{', '.join(missing)} not in this Python: pip install 'specpilot[engine]', or set engine.python",
        )
    return ("ok", "engine", f"torch {metadata.version('torch')}")


def _memory() -> Line:
    memory = psutil.virtual_memory()
    words = f"{size_text(memory.available)} free of {size_text(memory.total)}"
    return (
        "ok" if memory.available > 4 * GIB else "warn",
        "memory",
        words + ("" if memory.available > 4 * GIB else "; the main job wants 4 GiB"),
    )


def _threads() -> Line:
    count = usable_cores()
    load = os.getloadavg()[0]
    busy = load > 0.5 * count
    return (
        "warn" if busy else "ok",
        "threads",
        f"{count}, load {load:.1f}" + ("; timings will wander" if busy else ""),
    )


def _disk() -> Line:
    folder = home()
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    if not os.access(existing, os.W_OK):
        return ("bad", "disk", f"{folder} is not writable: set SPECPILOT_HOME")
    free = shutil.disk_usage(Path(existing)).free
    level = "ok" if free > 3 * GIB else "warn" if free > GIB else "bad"
    return (
        level,
        "disk",
        f"{size_text(free)} free for {folder}" + ("" if level == "ok" else "; the main job wants 3 GiB"),
    )
