"""Which `Shape` to launch a matrix with: a heuristic, a search on the card at hand, and a file of what it found.

`parts` decides in which order products are added, hence the bits of a result. It is chosen once per matrix shape, for
all row counts together; how the parts are placed, width, rows and ring are chosen per row count. So a token's result does
not depend on how many tokens ride along, as long as one file is in force.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specpilot.kernels.w12.gemm import Shape, padded_rows
from specpilot.kernels.w12.layout import COLUMNS, ROWS

TUNED = Path(__file__).parent / "tuned"
BUCKETS = (8, 16, 32, 64)
PARTS = (1, 2, 4, 8)
FINALISTS = 8
W12_SUBTILE = 1552  # the usual size; candidates that fit it with a longer record are filtered again at launch


def card_name(device: torch.device | int | None = None) -> str:
    """The card's name as a file name: NVIDIA_H200."""
    return re.sub(r"\W+", "_", torch.cuda.get_device_name(device)).strip("_")


def placements(k: int, parts: int) -> Iterator[tuple[int, int]]:
    """(split, depth) that make so many parts of the columns."""
    for split in (1, 2, 4):
        if parts % split == 0 and parts // split in (1, 2, 4) and k // COLUMNS % split == 0:
            yield split, parts // split


def cluster_counts(processors: int, split: int) -> list[int]:
    """How many clusters may run at once. Multiprocessors come in groups that clusters of four do not fill."""
    shares = (1.0,) if split < 4 else (1.0, 0.91, 0.85)
    return [int(share * processors) // split for share in shares]


def candidates(n: int, k: int, parts: int, m: int, processors: int, subtile: int = W12_SUBTILE) -> Iterator[Shape]:
    """Shapes of one order of additions that fit a thread block at m rows; several parts in one round only."""
    row_tiles = -(-n // ROWS)
    for split, depth in placements(k, parts):
        for width in _widths(row_tiles, split, 8 if parts == 1 else 1, processors):
            for rows, grouped, subtiles in product((1, 2), (False, True), (1, 2, 4)):
                shape = Shape(width, rows, split, depth, stages=1, stage_subtiles=subtiles, grouped=grouped)
                fitting = [s for s in range(2, 9) if replace(shape, stages=s).fits(subtile, m)]
                for stages in {fitting[-1], *(s for s in (3, 4) if s in fitting)} if fitting else ():
                    yield replace(shape, stages=stages)
                    if subtiles > 1:
                        yield replace(shape, stages=stages, boxed=False)


def _widths(row_tiles: int, split: int, rounds: int, processors: int) -> list[int]:
    counts = [count for count in cluster_counts(processors, split) if count]
    widths = {-(-row_tiles // (count * r)) for count in counts for r in range(1, rounds + 1)}
    return sorted(width for width in widths if width <= 20)[-3:]


@cache  # an untuned matrix asks at every launch, and the search takes tens of milliseconds
def heuristic(n: int, k: int, m: int, processors: int, subtile: int = W12_SUBTILE, best: bool = False) -> Shape:
    """A launch for a matrix that nobody tuned. Its order of additions depends on the matrix and the card only.

    best: for the list of best logits, whose order of additions is always (1, 1).
    """
    row_tiles = -(-n // ROWS)
    complete = [
        (split, depth)
        for parts in (PARTS if not best else ())
        for split, depth in placements(k, parts)
        if 1 < parts
        and split <= 2
        and row_tiles <= 8 * (processors // split)
        and all(any(_fitting(n, k, parts, b, processors, subtile)) for b in BUCKETS)
    ]
    split, depth = min(complete, key=lambda order: _distance(row_tiles, order[0], order[1], processors), default=(1, 1))
    return _largest(n, k, split * depth, m, processors, subtile, best)


def _fitting(n: int, k: int, parts: int, m: int, processors: int, subtile: int, best: bool = False) -> Iterator[Shape]:
    """Without `grouped`, which not every card has, and large clusters, which not every card can fill."""
    found = candidates(n, k, parts, m, processors, subtile)
    return (c for c in found if c.fits(subtile, m, best) and not c.grouped and c.split <= 2)


@cache
def _largest(n: int, k: int, parts: int, m: int, processors: int, subtile: int, best: bool) -> Shape:
    """The shape of an order of additions that wastes least rows and has the deepest ring."""
    fitting = list(_fitting(n, k, parts, m, processors, subtile, best))
    if not fitting and parts == 1:
        fitting = [s for s in (Shape(w, stages=3) for w in (12, 8, 4, 2, 1)) if s.fits(subtile, m, best)]
    if not fitting:
        raise ValueError(f"no launch of {n} rows in {parts} parts fits at {m} rows of x: tune this card")
    row_tiles = -(-n // ROWS)

    def worth(c: Shape) -> tuple[int, float, int, int]:
        used = -(-row_tiles // c.width)
        return (
            -c.width * used,
            -_distance(row_tiles, c.split, c.depth, processors),
            c.stage_subtiles * c.stages,
            -c.rows,
        )

    return max(fitting, key=worth)


def _distance(row_tiles: int, split: int, depth: int, processors: int) -> float:
    width = -(-row_tiles // (processors // split))
    used = -(-row_tiles // width) * split / processors
    return abs(width * depth - 14) + 40 * (1 - used) + 2 * split


@cache
def _table(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(path.read_text())["shapes"] if path.exists() else {}


def choose(
    n: int,
    k: int,
    m: int,
    device: torch.device | int | None = None,
    *,
    subtile: int = W12_SUBTILE,
    best: bool = False,
) -> Shape:
    """The tuned shape of the card's file, else the heuristic. subtile, best: as for `heuristic`.

    Every launch asks, so what was found is kept.
    """
    if not isinstance(device, int):
        index = device.index if device is not None else None
        device = torch.cuda.current_device() if index is None else index
    # What fits, and which choice, depends on no more than the rows that the kernel computes.
    return _chosen(n, k, padded_rows(m), *_card(device), subtile, best)


@cache
def _card(device: int) -> tuple[Path, int]:
    """The file of a card's tuned shapes, there or not, and its multiprocessors."""
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return TUNED / f"{card_name(device)}.json", processors


@cache
def _chosen(n: int, k: int, m: int, file: Path, processors: int, subtile: int, best: bool) -> Shape:
    found = _table(file).get(f"{n}x{k}", {}).get(str(m))
    if not found:
        return heuristic(n, k, m, processors, subtile, best)
    shape = Shape(**found)
    if best and shape.parts > 1:
        return heuristic(n, k, m, processors, subtile, best)
    # The lists of best logits need room: a head takes several rounds anyway, so rather narrower than a shorter ring.
    widths = range(shape.width, 0 if best else shape.width - 1, -1)
    for width, stages in product(widths, range(shape.stages, min(shape.stages, 3) - 1 if best else 1, -1)):
        smaller = replace(shape, width=width, stages=stages)
        if smaller.fits(subtile, m, best):
            return smaller
    return _largest(n, k, shape.parts, m, processors, subtile, best)  # the same order of additions


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
    found: dict[int, dict[int, tuple[float, Shape]]] = {}
    for parts in PARTS:
        found[parts] = {}
        for m in buckets:
            timed = [(measure(shape, m), shape) for shape in candidates(n, k, parts, m, processors)]
            # The fastest of hundreds owes something to luck: the first few are timed again.
            finalists = [shape for _, shape in sorted(timed, key=lambda pair: pair[0])[:FINALISTS]]
            again = [(median(measure(shape, m) for _ in range(5)), shape) for shape in finalists]
            if again:
                found[parts][m] = min(again, key=lambda pair: pair[0])
    complete = {parts: best for parts, best in found.items() if set(best) == set(buckets)}

    def cost(parts: int) -> float:
        logs = [weights.get(m, 1.0) * torch.tensor(t).log().item() for m, (t, _) in complete[parts].items()]
        return sum(logs) / sum(weights.get(m, 1.0) for m in complete[parts])

    chosen = complete[min(complete, key=cost)]
    return {str(m): asdict(shape) for m, (_, shape) in chosen.items()}
