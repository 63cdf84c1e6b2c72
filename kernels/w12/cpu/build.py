"""Compiles the C++ kernels once per machine and loads them, on the threads that torch uses.

The library's name is a digest of sources, flags, compiler and processor, so that a cache folder shared between machines
never serves one what was built for another.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from ..errors import MachineProblem

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-std=c++17")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled kernels: AVX2, or AVX-512 with SPECPILOT_W12_AVX512=1 where the processor has it.

    AVX-512 is not the default because it pays at many rows, where W12 does not: on the one processor measured one row
    took 6 to 16 % longer than with AVX2 (experiments/w12/cpu.md). Raises MachineProblem without a compiler, or on a
    processor without AVX2 and FMA.
    """
    cpu = _processor()
    if not {"avx2", "fma"} <= set(cpu.split()):
        raise MachineProblem(f"the W12 kernels need AVX2 and FMA, this {platform.machine()} processor lacks them")
    compiler = next((c for c in map(shutil.which, filter(None, [os.environ.get("CXX"), "g++", "clang++"])) if c), None)
    if compiler is None:
        raise MachineProblem("no C++ compiler found (g++, clang++)", "install g++, or set CXX.")
    command = [compiler, *FLAGS, *([] if os.environ.get("SPECPILOT_W12_AVX512") == "1" else ["-DW12_AVX2"])]
    digest = hashlib.sha256("\0".join([*command, _version(compiler), cpu]).encode())
    for path in sorted([*SOURCES.glob("*.hpp"), *SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    built = _cache() / f"{digest.hexdigest()[:32]}.so"
    if not built.exists():
        _compile(command, built)
    return _declare(ctypes.CDLL(str(built)))


def use_torch_threads() -> None:
    """Let the kernels run on as many threads as torch does now (call again after torch.set_num_threads)."""
    library().w12_team(*openmp_entry_points(), torch.get_num_threads())


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.w12_team.argtypes = [pointer, pointer, pointer, ctypes.c_int]
    lib.w12_allocate.argtypes, lib.w12_allocate.restype = [ctypes.c_size_t], pointer
    lib.w12_release.argtypes = [pointer, ctypes.c_size_t]
    lib.w12_find_plain.argtypes = [pointer, number, number, pointer]
    lib.w12_pack.argtypes = [pointer, pointer, number, number, pointer, pointer, pointer, pointer]
    lib.w12_gemm.argtypes = [pointer, pointer, number, number, pointer, number]
    lib.w12_team(*openmp_entry_points(), torch.get_num_threads())
    return lib


def openmp_entry_points() -> list[int | None]:
    """Addresses in the OpenMP runtime that torch loaded; nulls, and so one thread, where it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/" in line and any(name in Path(path).name for name in ("libgomp", "libiomp", "libomp")):
            runtime = ctypes.CDLL(path)
            return [ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value for name in _OPENMP]
    return [None, None, None]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return " ".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags"))))


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _cache() -> Path:
    """`$SPECPILOT_W12_CACHE`, else a folder in the temporary directory that only this user may write."""
    named = os.environ.get("SPECPILOT_W12_CACHE")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"specpilot-w12-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not named and (folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise MachineProblem(f"{folder} is not owned by this user alone", "remove it, or set SPECPILOT_W12_CACHE.")
    return folder


def _compile(command: list[str], library: Path) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        words = [*command, str(SOURCES / "w12.cpp"), "-o", temporary]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MachineProblem(
                f"{command[0]} refused w12.cpp:\n{done.stderr[-4000:]}", "install a g++ that knows C++17."
            )
        os.replace(temporary, library)  # atomic: two processes may build at once
    finally:
        Path(temporary).unlink(missing_ok=True)
