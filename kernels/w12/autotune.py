"""Which `Shape` to launch a matrix with: a heuristic, a search on the card at hand, and a file of what it found.

`split` and `depth` decide in which order parts are added, hence the bits of a result. They are chosen once per matrix
shape, for all row counts together; width, rows and ring are chosen per row count. So a token's result does not depend
on how many tokens ride along, as long as one file is in force.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specpilot.kernels.w12.gemm import Shape
from specpilot.kernels.w12.layout import COLUMNS, ROWS

TUNED = Path(__file__).parent / "tuned"
BUCKETS = (8, 16, 32, 64)
W12_SUBTILE = 1552  # the usual size; candidates that fit it with a longer record are filtered again at launch


def card_name(device: torch.device | int | None = None) -> str:
    """The card's name as a file name: NVIDIA_H200."""
    return re.sub(r"\W+", "_", torch.cuda.get_device_name(device)).strip("_")


def bucket_of(m: int) -> int:
    """Row counts that share a choice: 8, 16, 32 or 64."""
    return next(b for b in BUCKETS if m <= b)


def orders(n: int, k: int, processors: int) -> Iterator[tuple[int, int]]:
    """(split, depth) worth trying: enough warps for a multiprocessor, whole matrix in one round unless (1, 1)."""
    yield 1, 1
    row_tiles = -(-n // ROWS)
    for split in (1, 2):  # clusters of four did not all fit at once on an H200: two rounds
        for depth in (1, 2, 4):
            if split * depth > 1 and k // COLUMNS // 4 >= split and row_tiles <= 20 * (processors // split):
                yield split, depth


def candidates(n: int, split: int, depth: int, m: int, processors: int, subtile: int = W12_SUBTILE) -> Iterator[Shape]:
    """Shapes of one order of additions that fit a thread block at m rows."""
    row_tiles = -(-n // ROWS)
    groups = processors // split
    rounds = range(1, 9) if split * depth == 1 else (1,)
    widths = sorted({-(-row_tiles // (groups * r)) for r in rounds if -(-row_tiles // (groups * r)) <= 20})
    for width in widths[-3:]:
        for rows in (1, 2):
            for subtiles in (1, 2, 4):
                if subtiles < depth:
                    continue
                shape = Shape(width=width, rows=rows, split=split, depth=depth, stages=1, stage_subtiles=subtiles)
                fitting = [s for s in range(2, 9) if replace(shape, stages=s).fits(subtile, m)]
                for stages in {fitting[-1], *(s for s in (3, 4) if s in fitting)} if fitting else ():
                    yield replace(shape, stages=stages)
                    if subtiles > 1:
                        yield replace(shape, stages=stages, boxed=False)


def heuristic(n: int, k: int, m: int, processors: int, subtile: int = W12_SUBTILE, best: bool = False) -> Shape:
    """A launch for a matrix that nobody tuned. Its order of additions depends on the matrix and the card only.

    best: for the list of best logits, whose order of additions is always (1, 1).
    """
    row_tiles = -(-n // ROWS)
    order = [
        (s, d)
        for s, d in orders(n, k, processors)
        if s * d > 1
        and row_tiles <= 8 * (processors // s)
        and all(_fitting(n, s, d, b, processors, subtile) for b in BUCKETS)
    ]
    split, depth = (
        (1, 1) if best or not order else min(order, key=lambda o: _distance(row_tiles, o[0], o[1], processors))
    )
    return _largest(n, split, depth, m, processors, subtile, best)


def _fitting(n: int, split: int, depth: int, m: int, processors: int, subtile: int, best: bool = False) -> list[Shape]:
    return [c for c in candidates(n, split, depth, m, processors, subtile) if c.fits(subtile, m, best)]


def _largest(n: int, split: int, depth: int, m: int, processors: int, subtile: int, best: bool) -> Shape:
    """The shape of an order of additions that wastes least rows and has the deepest ring."""
    fitting = _fitting(n, split, depth, m, processors, subtile, best)
    if not fitting and split * depth == 1:
        fitting = [s for s in (Shape(w, stages=3) for w in (12, 8, 4, 2, 1)) if s.fits(subtile, m, best)]
    if not fitting:
        raise ValueError(
            f"no launch of {n} rows with split {split}, depth {depth} fits at {m} rows of x: tune this card"
        )
    row_tiles = -(-n // ROWS)
    return max(fitting, key=lambda c: (-c.width * -(-row_tiles // c.width), c.stage_subtiles * c.stages, -c.rows))


def _distance(row_tiles: int, split: int, depth: int, processors: int) -> float:
    width = -(-row_tiles // (processors // split))
    used = -(-row_tiles // width) * split / processors
    return abs(width * depth - 14) + 40 * (1 - used) + 2 * split


@cache
def _table(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(path.read_text())["shapes"] if path.exists() else {}


def choose(n: int, k: int, m: int, device: torch.device | int | None = None, **limits: object) -> Shape:
    """The tuned shape of the card's file, else the heuristic. limits: `subtile`, `best` as for `heuristic`."""
    properties = torch.cuda.get_device_properties(device if device is not None else torch.cuda.current_device())
    best = bool(limits.get("best", False))
    subtile = int(str(limits.get("subtile", W12_SUBTILE)))
    found = _table(TUNED / f"{card_name(device)}.json").get(f"{n}x{k}", {}).get(str(bucket_of(m)))
    processors = properties.multi_processor_count
    if not found:
        return heuristic(n, k, m, processors, subtile, best)
    shape = Shape(**found)
    if best and shape.split * shape.depth > 1:
        return heuristic(n, k, m, processors, subtile, best)
    while shape.stages > 2 and not shape.fits(subtile, m, best):
        shape = replace(shape, stages=shape.stages - 1)
    if shape.fits(subtile, m, best):
        return shape
    return _largest(n, shape.split, shape.depth, m, processors, subtile, best)  # the same order of additions


def tune(
    n: int,
    k: int,
    measure: Callable[[Shape, int], float],
    processors: int,
    buckets: Iterable[int] = BUCKETS,
    weights: dict[int, float] | None = None,
) -> dict[str, dict[str, int]]:
    """Time every candidate with `measure(shape, m) -> microseconds`; the table entry of the matrix.

    The order of additions is the one whose best shapes are fastest over all row counts, by geometric mean with
    `weights` (by default 8 and 16 rows count twice).
    """
    weights = weights or {8: 2.0, 16: 2.0}
    found: dict[tuple[int, int], dict[int, tuple[float, Shape]]] = {}
    for split, depth in orders(n, k, processors):
        found[split, depth] = {}
        for m in buckets:
            timed = [(measure(shape, m), shape) for shape in candidates(n, split, depth, m, processors)]
            if timed:
                found[split, depth][m] = min(timed, key=lambda pair: pair[0])
    complete = {order: best for order, best in found.items() if set(best) == set(buckets)}

    def cost(order: tuple[int, int]) -> float:
        logs = [weights.get(m, 1.0) * torch.tensor(t).log().item() for m, (t, _) in complete[order].items()]
        return sum(logs) / sum(weights.get(m, 1.0) for m in complete[order])

    chosen = complete[min(complete, key=cost)]
    return {str(m): asdict(shape) for m, (_, shape) in chosen.items()}
