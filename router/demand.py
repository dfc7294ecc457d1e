"""Demand: how much of the time the event loop has something to do."""

from __future__ import annotations

import time
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux, Documentation/scheduler/sched-stats.rst: nanoseconds run, nanoseconds waited for a processor, time slices."""


class Demand:
    """Of the thread that makes it, which alone may ask. It counts what the thread ran and what it waited for a processor that
    others had: by its processor time alone a thread among many looks idle just when it falls behind."""

    def __init__(self) -> None:
        self._is_counted = SCHEDSTAT.exists()
        self._asked_at, self._wanted = time.monotonic(), self._seconds()

    def since_last(self, now: float) -> float:
        """Between 0 and about 1, since the last time it was asked. now: time.monotonic() seconds."""
        wanted = self._seconds()
        share = (wanted - self._wanted) / max(1e-9, now - self._asked_at)
        self._asked_at, self._wanted = now, wanted
        return share

    def _seconds(self) -> float:
        if not self._is_counted:
            return time.thread_time()
        ran, waited, _ = SCHEDSTAT.read_bytes().split()
        return (int(ran) + int(waited)) * 1e-9
