"""Threads that compute: how many, and how long they spin while they wait for each other. Torch-free, for use before torch."""

from __future__ import annotations

import os

SPIN_COUNT = "1000"
"""With OpenMP's default, threads of two busy processes on two cores spin against each other: a decode step of 11 ms took 100 to
1000. With 1000 rounds, a step alone is as fast and a busy neighbour costs its share and no more (docs/performance.md)."""


def default_threads() -> int:
    """Half of the cores this process may use: a prefill and a decode worker share a machine."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def limit_spinning() -> None:
    """Takes effect in libraries loaded after it. A value that is set already stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
