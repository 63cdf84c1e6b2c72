"""y = x W^T on the CPU from W12 or BF16 weights: the same C++ kernel, float32 activations and sums.

A row's result has the same bits however many rows ride along, however many threads run, and whichever of the two formats
the weights are in.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch
from torch import Tensor

from ..format import Planes, decode
from .build import library

PANEL = 16  # output channels of a panel (panels.hpp); bases must not change inside one
UNIT = 4  # k of a unit
_PLAIN, _TIGHT = 128, 96  # bytes of a unit


class _Matrix(ctypes.Structure):
    """`Matrix` of panels.hpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("data", "panel_at", "tables", "runs", "first_run")],
        *[(name, ctypes.c_int64) for name in ("N", "K")],
    ]


class CpuLinear:
    """A weight [N, K] packed for the CPU. Call it with x [M, K]; `from_planes` and `from_bf16` make one."""

    def __init__(self, weight: Tensor, row_base: np.ndarray, plain: np.ndarray) -> None:
        """weight: bfloat16 [N, K]; row_base: int32 [N]; plain: uint8 [panels, units], 1 where a unit stays BF16."""
        lib = library()
        self.out_features, self.in_features = weight.shape
        self._gemm = lib.w12_gemm
        panel_at = np.concatenate([[0], np.cumsum(np.where(plain, _PLAIN, _TIGHT).sum(1))]).astype(np.int64)
        self.nbytes = int(panel_at[-1])
        """Bytes of all panels: what a call reads of the weights."""
        address = lib.w12_allocate(self.nbytes)
        if not address:
            raise MemoryError(f"cannot allocate {self.nbytes} bytes for a weight of shape {tuple(weight.shape)}")
        weakref.finalize(self, lib.w12_release, address, self.nbytes)
        tables = torch.empty(len(plain) * 32, dtype=torch.uint8).numpy()  # torch aligns to 64 bytes
        weight = weight.contiguous()
        lib.w12_pack(
            weight.data_ptr(), row_base.ctypes.data, *weight.shape, plain.ctypes.data, panel_at.ctypes.data, address,
            tables.ctypes.data,
        )  # fmt: skip
        runs, first = _runs(plain)
        self._keep = [panel_at, tables, runs, first]
        self._matrix = _Matrix(address, *(array.ctypes.data for array in self._keep), *weight.shape)

    @classmethod
    def from_bf16(cls, weight: Tensor) -> CpuLinear:
        """From bfloat16 [N, K], stored as it is (16 bits a weight). Raises TypeError, or ValueError if it is empty."""
        if weight.dtype != torch.bfloat16:
            raise TypeError(f"a bfloat16 matrix is needed, got {weight.dtype}")
        rows, columns = _shape(tuple(weight.shape))
        return cls(weight, np.zeros(rows, np.int32), np.ones((-(-rows // PANEL), -(-columns // UNIT)), np.uint8))

    @classmethod
    def from_planes(cls, planes: Planes) -> CpuLinear:
        """From the planes of `format.encode`. Raises ValueError if a base changes inside 16 rows, or if it is empty."""
        rows, columns = _shape(planes.shape)
        block = planes.row_block
        if block is not None and block % PANEL:
            raise ValueError(f"row_block {block}: the CPU kernel needs a multiple of {PANEL}, or None")
        base = planes.base.numpy()
        row_base = np.ascontiguousarray(np.broadcast_to(base, rows) if block is None else base.repeat(block)[:rows])
        plain = np.zeros((-(-rows // PANEL), -(-columns // UNIT)), np.uint8)
        library().w12_find_plain(planes.codes.contiguous().data_ptr(), rows, columns, plain.ctypes.data)
        return cls(decode(planes), row_base, plain)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [M, K], any float type (used as float32) -> float32 [M, N]. Raises ValueError for another shape."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}, this weight needs [rows, {self.in_features}]")
        x = x.float().contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        self._gemm(
            ctypes.addressof(self._matrix),
            x.data_ptr(),
            x.shape[0],
            self.in_features,
            out.data_ptr(),
            self.out_features,
            torch.get_num_threads(),  # of the thread that computes, now: it may not be the one that packed
        )
        return out


def _shape(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"a matrix with at least one weight is needed, got shape {shape}")
    return shape[0], shape[1]


def _runs(plain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tight, plain) run lengths of every panel (uint32 [runs, 2]) and where each panel's begin (int64 [panels + 1])."""
    runs: list[tuple[int, int]] = []
    first = [0]
    for row in plain:
        edges = np.flatnonzero(np.diff(row, prepend=0, append=0)).tolist()  # starts and ends of plain stretches
        at = 0
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            runs.append((start - at, stop - start))
            at = stop
        if at < len(row):
            runs.append((len(row) - at, 0))
        first.append(len(runs))
    return np.array(runs, np.uint32).reshape(-1, 2), np.array(first, np.int64)
