"""Launch the CUDA kernels on tiles: y = x W^T for 1..64 rows, its fused variants, and how a launch is shaped.

Nothing is allocated and nothing is waited for inside a launch when the caller gives the outputs, so launches may be
captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specpilot.kernels.w12.layout import COLUMNS, ROWS, Tiles
from specpilot.kernels.w12.library import Arguments, load, target_of

MAX_ROWS = 64
STORE, SILU, BEST = 0, 1, 2
GROUP = 4  # warps that multiply together
TOP = 16  # places of a list of best logits
SHARED_LIMIT = 227 * 1024 - 512  # a block's shared memory on compute capability 9.0, less what is static
_FORMATS = {"w12": 0, "bf16": 1}


@dataclass(frozen=True)
class Shape:
    """How one launch is cut. Only `parts` changes results (by the order of additions); the rest is speed."""

    width: int
    """Row tiles (16 rows each) of one thread block."""
    rows: int = 1
    """Row tiles of one warp, 1 or 2."""
    split: int = 1
    """Thread blocks (one cluster) that share the columns of a row tile: 1, 2, 4 or 8; divides K / 64."""
    depth: int = 1
    """Warps of one block that share the columns of a row tile: 1, 2 or 4; divides `stage_subtiles`."""
    stages: int = 4
    """Depth of the ring of shared memory."""
    stage_subtiles: int = 2
    """64-column steps of one stage."""
    blocks: int = 1
    """Thread blocks for each multiprocessor: 2 only helps when two fit."""
    boxed: bool = True
    """Whether a stage of weights is one copy of a box, or one run of bytes for each row tile."""
    grouped: bool = False
    """Whether four warps multiply together (`wgmma`, compute capability 9.0), with one row tile each."""

    @property
    def parts(self) -> int:
        """Sums that are added in the end: part i is over the subtiles i, i + parts, i + 2 parts, ... of 64 columns."""
        return self.split * self.depth

    @property
    def manner(self) -> int:
        """`Manner` of gemm.cuh."""
        return GROUP if self.grouped else self.rows

    @property
    def warps(self) -> int:
        """Consuming warps."""
        if self.grouped:
            return -(-self.width // GROUP) * GROUP * self.depth
        return -(-self.width // self.rows) * self.depth

    def shared_bytes(self, subtile: int, m: int, best: bool = False) -> int:
        """Dynamic shared memory of a launch with m rows over subtiles of so many bytes, as the kernel computes it."""
        tokens = padded_rows(m)
        weights = -(-self.stage_subtiles * self.width * subtile // 128) * 128
        stage = weights + self.stage_subtiles * tokens * COLUMNS * 2
        reduction = self.depth * self.width * ROWS * tokens * 4 if self.parts > 1 else 0
        lists = tokens * ((self.width * ROWS + 8) * 2 + TOP * 8) if best else 0
        return 1024 + max(self.stages * stage + self.warps * 2048 + lists, reduction)  # 1024: alignment

    def fits(self, subtile: int, m: int, best: bool = False) -> bool:
        """Whether a block of threads can be launched so."""
        if min(self.width, self.stages, self.stage_subtiles) < 1 or not (
            self.rows in (1, 2) and self.split in (1, 2, 4, 8) and self.depth in (1, 2, 4)
        ):
            return False
        return (
            not (self.grouped and self.rows == 2)
            and (self.warps + 1) * 32 <= self._thread_limit(m)
            and self.shared_bytes(subtile, m, best) <= SHARED_LIMIT
            and self.stages <= 16
            and self.stage_subtiles % self.depth == 0
        )

    def _thread_limit(self, m: int) -> int:
        """`max_threads` of gemm.cuh."""
        if self.grouped:
            return 672
        return 352 if self.rows == 2 else 512 if padded_rows(m) == 64 else 640


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
    top: int = TOP,
    processors: int | None = None,
    dependent: bool = False,
) -> int:
    """One launch on the current stream; returns the number of thread blocks.

    x: bfloat16 [m, K], rows contiguous and 16-byte aligned. y: bfloat16 [m, N] (SILU: [m, N / 2]). residual: like y,
    added to the rounded product. best: float32 and int32 of at least
    blocks * m * 16 for BEST, `top` of which matter in each list. processors: thread blocks to spread a
    matrix over when it needs several rounds, by default the card's multiprocessors. dependent: programmatic dependent
    launch, so that weights stream while the previous kernel ends. Raises ValueError for what the kernel cannot do.
    """
    m, k = x.shape
    n = tiles.shape[0]
    _check(tiles, x, y, residual, shape, epilogue)
    row_tiles, subtiles = tiles.data.shape[:2]
    processors = processors or torch.cuda.get_device_properties(x.device).multi_processor_count
    needed = -(-row_tiles // shape.width)
    groups = min(needed, max(1, processors * shape.blocks // shape.split))
    if shape.parts > 1 and groups < needed:
        raise ValueError(f"{shape} must take {row_tiles} row tiles in one round; {processors} multiprocessors do not")
    if epilogue == BEST and (best is None or min(t.numel() for t in best) < groups * m * TOP or not 1 <= top <= TOP):
        raise ValueError(f"the {top} best logits need two lists of {groups} x {m} x {TOP}, and at most {TOP} are kept")
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
        boxed=int(shape.boxed),
        top=top,
        dependent=int(dependent),
    )
    _call(
        x.device,
        "w12_gemm",
        f"product of {tuple(x.shape)} and {tiles.shape} with {shape}",
        ctypes.byref(arguments),
        _FORMATS[tiles.kind],
        epilogue,
        shape.manner,
        groups,
    )
    return groups * shape.split


def library_of(device: torch.device) -> ctypes.CDLL:
    """The kernels compiled for a CUDA device. Raises MachineProblem where they cannot be had."""
    return load(target_of(torch.cuda.get_device_capability(device)))


def _call(device: torch.device, function: str, what: str, *arguments: Any) -> None:
    """Call `function` of the library with the device's current stream last. Raises RuntimeError with what CUDA said.

    The device is made the current one meanwhile: torch's default stream has the handle 0, which CUDA takes for the
    default stream of whatever device is current.
    """
    library = library_of(device)
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        words: bytes | None = getattr(library, function)(*arguments, stream)
    if words:
        raise RuntimeError(f"W12 {what}: {words.decode()}")


def finish_best(
    best: tuple[Tensor, Tensor], blocks: int, value: Tensor | None, index: Tensor, dependent: bool = False
) -> None:
    """Merge the lists of `blocks` thread blocks into index (int64 [m, top]) and value (float32 [m, top] or None)."""
    m, top = index.shape
    pointer = value.data_ptr() if value is not None else None
    _call(
        index.device,
        "w12_finish_best",
        "merge of the best logits",
        best[0].data_ptr(),
        best[1].data_ptr(),
        pointer,
        index.data_ptr(),
        blocks,
        m,
        top,
        int(dependent),
    )


def expand(tiles: Tiles, out: Tensor) -> None:
    """The weight as bfloat16 [N, K], bit for bit, into `out` (contiguous)."""
    if out.dtype != torch.bfloat16 or out.numel() != tiles.shape[0] * tiles.shape[1] or not out.is_contiguous():
        raise ValueError(f"out must be contiguous bfloat16 of {tiles.shape}, got {out.dtype} {tuple(out.shape)}")
    row_tiles, subtiles, size = tiles.data.shape
    _call(
        out.device,
        "w12_expand",
        "expansion",
        tiles.data.data_ptr(),
        tiles.overflow.data_ptr(),
        out.data_ptr(),
        _FORMATS[tiles.kind],
        tiles.shape[0],
        row_tiles,
        subtiles,
        size,
        int(tiles.paired),
    )


def add_norm(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    eps: float = 1e-6,
    centred: bool = False,
    dependent: bool = False,
) -> None:
    """total = x + residual (rounded); y = RMSNorm(total) * weight, or * (1 + weight) if centred.

    All bfloat16 [rows, K], contiguous. The product that follows, launched dependent, streams its weights meanwhile.
    """
    rows, columns = x.shape
    if (residual is None) != (total is None):
        raise ValueError("residual and total go together")
    given = [t for t in (x, weight, y, residual, total) if t is not None]
    if columns > 12288 or columns % 8 or not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in given):
        raise ValueError(
            f"add_norm takes contiguous, 16-byte aligned rows of at most 12288 columns, a multiple of 8, got {tuple(x.shape)}"
        )
    _call(
        x.device,
        "w12_add_norm",
        "norm",
        x.data_ptr(),
        residual.data_ptr() if residual is not None else None,
        weight.data_ptr(),
        total.data_ptr() if total is not None else None,
        y.data_ptr(),
        rows,
        columns,
        eps,
        1.0 if centred else 0.0,
        int(dependent),
    )


def _check(tiles: Tiles, x: Tensor, y: Tensor | None, residual: Tensor | None, shape: Shape, epilogue: int) -> None:
    n, k = tiles.shape
    m = x.shape[0]
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be bfloat16 [rows, {k}], got {x.dtype} {tuple(x.shape)}")
    if x.device != tiles.data.device:
        raise ValueError(f"x lies on {x.device}, the weight on {tiles.data.device}: move one of them")
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"the kernel takes 1..{MAX_ROWS} rows, got {m}: expand the weight and call the library")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(f"rows of x must be contiguous and 16-byte aligned, got strides {x.stride()}")
    if not shape.fits(tiles.data.shape[2], m, epilogue == BEST):
        raise ValueError(
            f"{shape} does not fit a thread block at {m} rows ({shape.shared_bytes(tiles.data.shape[2], m)} bytes)"
        )
    if epilogue == BEST and shape.parts > 1:
        raise ValueError("the best logits need split 1 and depth 1")
    if epilogue != STORE and residual is not None:
        raise ValueError("only the plain product adds a residual")
    if (epilogue == SILU) != tiles.paired:
        raise ValueError("the SiLU variant and tiles of paired halves go together")
    if epilogue != BEST:
        wanted = (m, n // 2 if epilogue == SILU else n)
        for name, out in (("y", y), ("residual", residual)):
            if out is None and name == "residual":
                continue
            if out is None or out.dtype != torch.bfloat16 or tuple(out.shape) != wanted or out.stride(1) != 1:
                raise ValueError(f"{name} must be bfloat16 {list(wanted)} with contiguous rows")
        if residual is not None and y is not None and residual.stride(0) != y.stride(0):
            raise ValueError("residual and y must have one row stride")
    if tiles.data.shape[1] % shape.split:
        raise ValueError(
            f"split {shape.split} does not divide the {tiles.data.shape[1]} subtiles of a row of this matrix"
        )
