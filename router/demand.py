"""Demand: how much of the time the event loop has something to do."""

from __future__ import annotations

import os
import time
from io import FileIO
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux, Documentation/scheduler/sched-stats.rst: nanoseconds run, nanoseconds waited for a processor, time slices."""


class Demand:
    """Of the thread that makes it. It counts what the thread ran and what it waited for a processor that others had: by its
    processor time alone a thread among many looks idle when it falls behind. Where the kernel does not count (CONFIG_SCHEDSTATS)
    that is what is left. What it waited for Python's lock is not seen."""

    def __init__(self) -> None:
        self._schedstat = _open(SCHEDSTAT)
        if self._schedstat is not None and self._seconds() == 0:
            self._schedstat = None
        self._asked_at, self._wanted = time.monotonic(), self._seconds()

    def since_last(self, now: float) -> float:
        """Between 0 and about 1, since the last time it was asked. now: time.monotonic() seconds."""
        wanted = self._seconds()
        share = (wanted - self._wanted) / max(1e-9, now - self._asked_at)
        self._asked_at, self._wanted = now, wanted
        return share

    def _seconds(self) -> float:
        if self._schedstat is None:
            return time.thread_time()
        ran, waited, _ = os.pread(self._schedstat.fileno(), 100, 0).split()
        return (int(ran) + int(waited)) * 1e-9


def _open(path: Path) -> FileIO | None:
    """Kept open: later there may be no file descriptor left."""
    try:
        return path.open("rb", buffering=0)
    except OSError:
        return None
