"""Time of GPU work as the decode graph runs it: captured, replayed, no host in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def graph_us(launches: Sequence[Callable[[], object]], *, replays: int = 10) -> float:
    """Microseconds per launch: the best replay of a graph that holds them all, one after the other.

    Launches that read different memory keep L2 from answering for it; give so many that together they exceed it.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return min(times) * 1e3 / len(launches)


def copies_beyond_l2(one_bytes: int, *, least: int = 4, most: int = 64) -> int:
    """How many sets of inputs a graph should go through so that none is still in L2 (50 MB on an H200) when its turn comes."""
    return max(least, min(most, (256 << 20) // max(one_bytes, 1)))
