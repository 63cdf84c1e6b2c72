"""Launch the CUDA kernels on tiles: y = x W^T for 1..64 rows, its fused variants, and how a launch is shaped.

Nothing is allocated and nothing is waited for inside a launch when the caller gives the outputs, so launches may be
captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from specpilot.kernels.w12.layout import COLUMNS, ROWS, Tiles
from specpilot.kernels.w12.library import Arguments, load, target_of

MAX_ROWS = 64
SPLIT_SUBTILES = 4  # columns are shared out in multiples of this many subtiles
STORE, SILU, ARGMAX = 0, 1, 2
SHARED_LIMIT = 227 * 1024 - 512  # a block's shared memory on compute capability 9.0, less what is static
_FORMATS = {"w12": 0, "bf16": 1}


@dataclass(frozen=True)
class Shape:
    """How one launch is cut. Only `split` and `depth` change results (by the order of additions); the rest is speed."""

    width: int
    """Row tiles (16 rows each) of one thread block."""
    rows: int = 1
    """Row tiles of one warp, 1 or 2."""
    split: int = 1
    """Thread blocks (one cluster) that share the columns of a row tile: 1, 2, 4 or 8."""
    depth: int = 1
    """Warps of one block that share the columns of a row tile: 1, 2 or 4; at most `stage_subtiles`."""
    stages: int = 4
    """Depth of the ring of shared memory."""
    stage_subtiles: int = 2
    """64-column steps of one stage."""

    @property
    def warps(self) -> int:
        """Consuming warps."""
        return -(-self.width // self.rows) * self.depth

    def shared_bytes(self, subtile: int, m: int) -> int:
        """Dynamic shared memory of a launch with m rows over subtiles of so many bytes, as the kernel computes it."""
        tokens = padded_rows(m)
        weights = -(-self.stage_subtiles * self.width * subtile // 128) * 128
        stage = weights + self.stage_subtiles * tokens * COLUMNS * 2
        reduction = self.depth * self.width * ROWS * tokens * 4 if self.split * self.depth > 1 else 0
        return 1024 + max(self.stages * stage + self.warps * 2048, reduction)  # 1024: alignment

    def fits(self, subtile: int, m: int) -> bool:
        """Whether a block of threads can be launched so."""
        limit = 352 if self.rows == 2 else 512 if padded_rows(m) == 64 else 640  # threads; `max_threads` of gemm.cu
        return (self.warps + 1) * 32 <= limit and (
            self.shared_bytes(subtile, m) <= SHARED_LIMIT and self.stages <= 16 and self.depth <= self.stage_subtiles
        )


def padded_rows(m: int) -> int:
    """Tokens that the kernel computes for m rows: 8, 16, 32 or 64."""
    return next(tokens for tokens in (8, 16, 32, 64) if m <= tokens)


def launch(
    tiles: Tiles,
    x: Tensor,
    y: Tensor | None,
    shape: Shape,
    epilogue: int = STORE,
    *,
    residual: Tensor | None = None,
    best: tuple[Tensor, Tensor] | None = None,
    processors: int | None = None,
    dependent: bool = False,
) -> int:
    """One launch on the current stream; returns the number of thread blocks.

    x: bfloat16 [m, K], rows contiguous and 16-byte aligned. y: bfloat16 [m, N] (SILU: [m, N / 2]). residual: like y,
    added to the rounded product. best: float32 and int32 [blocks, m] for ARGMAX. processors: thread blocks to spread a
    matrix over when it needs several rounds, by default the card's multiprocessors. dependent: programmatic dependent
    launch, so that weights stream while the previous kernel ends. Raises ValueError for what the kernel cannot do.
    """
    m, k = x.shape
    n = tiles.shape[0]
    _check(tiles, x, y, residual, shape, epilogue)
    row_tiles, subtiles = tiles.data.shape[:2]
    processors = processors or torch.cuda.get_device_properties(x.device).multi_processor_count
    needed = -(-row_tiles // shape.width)
    groups = min(needed, max(1, processors // shape.split))
    if shape.split * shape.depth > 1 and groups < needed:
        raise ValueError(f"{shape} needs {needed * shape.split} thread blocks at once, the card has {processors}")
    arguments = Arguments(
        weight=tiles.data.data_ptr(),
        overflow=tiles.overflow.data_ptr(),
        x=x.data_ptr(),
        residual=residual.data_ptr() if residual is not None else None,
        y=y.data_ptr() if y is not None else None,
        best_value=best[0].data_ptr() if best else None,
        best_index=best[1].data_ptr() if best else None,
        m=m,
        n=n,
        ldx=x.stride(0),
        ldy=y.stride(0) if y is not None else 0,
        row_tiles=row_tiles,
        subtiles=subtiles,
        subtile_bytes=tiles.data.shape[2],
        width=shape.width,
        split=shape.split,
        depth=shape.depth,
        stages=shape.stages,
        stage_subtiles=shape.stage_subtiles,
    )
    library = load(target_of(torch.cuda.get_device_capability(x.device)))
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    said = library.w12_gemm(
        ctypes.byref(arguments), _FORMATS[tiles.kind], epilogue, shape.rows, groups, int(dependent), stream
    )
    if said:
        raise RuntimeError(f"W12 kernel on {tuple(x.shape)} x {tiles.shape} with {shape}: {said.decode()}")
    return groups * shape.split


def _check(
    tiles: Tiles, x: Tensor, y: Tensor | None, residual: Tensor | None, shape: Shape, epilogue: int
) -> None:
    n, k = tiles.shape
    m = x.shape[0]
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be bfloat16 [rows, {k}], got {x.dtype} {tuple(x.shape)}")
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"the kernel takes 1..{MAX_ROWS} rows, got {m}: expand the weight and call the library")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(f"rows of x must be contiguous and 16-byte aligned, got strides {x.stride()}")
    if not shape.fits(tiles.data.shape[2], m):
        raise ValueError(f"{shape} does not fit a thread block at {m} rows ({shape.shared_bytes(tiles.data.shape[2], m)} bytes)")
    if epilogue == ARGMAX and shape.split * shape.depth > 1:
        raise ValueError("argmax needs split 1 and depth 1")
    if (epilogue == SILU) != tiles.paired:
        raise ValueError("the SiLU variant and tiles of paired halves go together")
    if epilogue != ARGMAX:
        wanted = (m, n // 2 if epilogue == SILU else n)
        for name, out in (("y", y), ("residual", residual)):
            if out is None and name == "residual":
                continue
            if out is None or out.dtype != torch.bfloat16 or tuple(out.shape) != wanted or out.stride(1) != 1:
                raise ValueError(f"{name} must be bfloat16 {list(wanted)} with contiguous rows")
        if residual is not None and y is not None and residual.stride(0) != y.stride(0):
            raise ValueError("residual and y must have one row stride")
    blocks = -(-tiles.data.shape[1] // SPLIT_SUBTILES)
    if shape.split > blocks:
        raise ValueError(f"split {shape.split} exceeds the {blocks} column blocks of this matrix")
