"""Time launches as an engine would see them: replayed from a CUDA graph, over weights that no cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specpilot.kernels.w12.layout import Tiles

ROTATE_BYTES = 1_400_000_000


def copies(nbytes: int) -> int:
    """How many copies of a weight fill ROTATE_BYTES (at least two)."""
    return max(2, -(-ROTATE_BYTES // nbytes))


def rotate(tiles: Tiles) -> list[Tiles]:
    """The same tiles at several addresses."""
    return [tiles, *(replace(tiles, data=tiles.data.clone()) for _ in range(copies(tiles.nbytes) - 1))]


def time_launches(launches: Sequence[Callable[[], object]], repeats: int = 9) -> tuple[float, float, float]:
    """Median, smallest and largest microseconds per launch, over `repeats` replays of a graph of all launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
    times = []
    for _ in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(launches))
    times = times[1:]  # the first replay uploads the graph
    return statistics.median(times), min(times), max(times)
