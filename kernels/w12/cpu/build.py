"""Compiles the C++ kernels once per machine and loads them, with the OpenMP runtime that torch uses."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from functools import lru_cache
from pathlib import Path

from ..compiling import compiled, loaded
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
    sources = [*SOURCES.glob("*.hpp"), *SOURCES.glob("*.cpp")]
    # The processor counts: a cache folder may be shared between machines.
    hint = "install a g++ with C++17."
    return _declare(
        loaded(lambda: compiled("w12-cpu", command, sources, [SOURCES / "w12.cpp"], made_for=cpu, hint=hint))
    )


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.w12_team.argtypes = [pointer, pointer, pointer]
    lib.w12_allocate.argtypes, lib.w12_allocate.restype = [ctypes.c_size_t], pointer
    lib.w12_release.argtypes = [pointer, ctypes.c_size_t]
    lib.w12_find_plain.argtypes = [pointer, number, number, pointer]
    lib.w12_pack.argtypes = [pointer, pointer, number, number, pointer, pointer, pointer, pointer]
    lib.w12_gemm.argtypes = [pointer, pointer, number, number, pointer, number, ctypes.c_int]
    lib.w12_team(*openmp_entry_points())
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
