"""Compile the CUDA kernels with nvcc, once per source and card, and load them. Nothing happens on import.

The library is plain C (pointers, integers, a stream), so that it needs no header of torch and loads beside any build of
it. `compiling` says where it lands.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from pathlib import Path

from specpilot.kernels.w12.compiling import compiled, loaded
from specpilot.kernels.w12.errors import MachineProblem

SOURCES = Path(__file__).parent / "cuda"
TARGETS = {9: "90a", 12: "120a"}
"""Major compute capability to the target to compile for. Needs mbarriers, bulk copies and clusters: sm_90 and later."""


class Arguments(ctypes.Structure):
    """`w12::Arguments` of cuda/gemm.cuh, field by field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weight", "overflow", "x", "residual", "y")],
        ("best_value", ctypes.c_void_p),
        ("best_index", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("m", "n", "ldx", "ldy", "row_tiles", "subtiles", "subtile_bytes")],
        *[(name, ctypes.c_int) for name in ("width", "split", "depth", "stages", "stage_subtiles")],
        *[(name, ctypes.c_int) for name in ("boxed", "top", "dependent")],
    ]


def find_nvcc() -> str | None:
    """Path of nvcc: $CUDACXX, the PATH, or $CUDA_HOME/bin, /usr/local/cuda/bin."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for found in (os.environ.get("CUDACXX"), shutil.which("nvcc"), *(f"{h}/bin/nvcc" for h in homes if h)):
        if found and Path(found).is_file():
            return found
    return None


def compile_library(target: str, folder: Path | None = None) -> Path:
    """Compile for `target` ("90a", "120a") unless already there; the path of the library.

    Raises MachineProblem without nvcc, or with the compiler's words when it fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise MachineProblem(
            "the W12 kernels must be compiled, and nvcc is not to be found",
            "install the CUDA toolkit (12.8 or newer) and put nvcc on the PATH or set CUDA_HOME; until then the layers use Triton",
        )
    flags = [*(["-DW12_WGMMA"] if target == "90a" else []), *os.environ.get("SPECPILOT_W12_NVCC_FLAGS", "").split()]
    command = [nvcc, "-O3", "-std=c++17", "-gencode", f"arch=compute_{target},code=sm_{target}", "--threads", "0"]
    command += ["--split-compile", "0", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v", *flags]
    sources = sorted(SOURCES.glob("*.cu*"))
    return compiled(f"w12-sm_{target}", command, sources, [p for p in sources if p.suffix == ".cu"], folder=folder)


@functools.cache
def load(target: str) -> ctypes.CDLL:
    """The kernels compiled for `target`, with argument types set."""
    library = loaded(lambda: compile_library(target))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.w12_gemm.argtypes = [ctypes.POINTER(Arguments), *[integer] * 4, pointer]
    library.w12_finish_best.argtypes = [*[pointer] * 4, *[integer] * 4, pointer]
    library.w12_expand.argtypes = [*[pointer] * 3, *[integer] * 6, pointer]
    library.w12_add_norm.argtypes = [*[pointer] * 5, *[integer] * 2, *[ctypes.c_float] * 2, integer, pointer]
    for name in ("w12_gemm", "w12_finish_best", "w12_expand", "w12_add_norm"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def target_of(capability: tuple[int, int]) -> str:
    """The compile target for a card. Raises MachineProblem for one that the kernels do not serve."""
    if capability[0] not in TARGETS:
        raise MachineProblem(
            f"the CUDA kernels serve compute capability 9.0 and 12.0, this card has {capability[0]}.{capability[1]}",
            "the layers use Triton there",
        )
    return TARGETS[capability[0]]
