"""The highest request rate at which objectives hold, by a bounded search over a grid of rates.

Rates are tried upwards from where to start, the step doubling, until one fails; then the range between is halved. It is assumed
that below a rate which holds all do: near the edge a measurement is a coin toss, which a finer grid does not cure.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def rate_grid(lowest: float, highest: float, *, ratio: float) -> list[float]:
    """From lowest to highest, each ratio times the one before, in three digits. Raises ValueError on an empty range."""
    if not 0 < lowest <= highest or ratio <= 1:
        raise ValueError(
            f"rates must be 0 < lowest <= highest and their ratio more than 1, got {lowest:g}, {highest:g}, {ratio:g}"
        )
    count = math.floor(math.log(highest / lowest) / math.log(ratio) + 1e-9) + 1
    return [float(f"{lowest * ratio**step:.3g}") for step in range(count)]


def highest_that_holds(count: int, holds: Callable[[int], bool], *, start: int = 0) -> int | None:
    """The index, of count, at which holds is last true; None: not even at 0. Asks for no index twice."""
    below, above = -1, count  # holds(below) is taken for true, holds(above) for false.
    index, step = min(max(start, 0), count - 1), 1
    while above - below > 1:
        if holds(index):
            below = index
        else:
            above = index
        if above == count:
            index, step = min(below + step, count - 1), step * 2
        elif below == -1:
            index, step = max(above - step, 0), step * 2
        else:
            index = (below + above) // 2
    return below if below >= 0 else None
