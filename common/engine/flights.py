"""Flights: steps that were launched and whose tokens have not been read yet, oldest first.

launch N   launch N+1   land N   launch N+2   land N+1       lookahead 1: the device works on N+1 while N is read
launch N   land N       launch N+1   land N+1                lookahead 0: nothing is in the air between two calls
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from common.engine.runner import Pending, Sampled

OnLanded = Callable[[list[list[Sampled]]], None]


class Flights:
    """Engine thread only. Steps land in the order in which they were launched, as they do on the device."""

    def __init__(self, *, lookahead: int) -> None:
        """lookahead: steps that may be in the air when the next one is launched (Runner.lookahead)."""
        self._lookahead = lookahead
        self._in_air: deque[tuple[Pending, OnLanded]] = deque()

    def __len__(self) -> int:
        return len(self._in_air)

    def add(self, pending: Pending, on_landed: OnLanded) -> None:
        """A launched step. on_landed: gets its tokens, within one of the calls below."""
        self._in_air.append((pending, on_landed))

    def land_due(self, *, launched: bool) -> None:
        """Waits until the next step may be launched; for all of them if none was launched now, for then nothing is gained by
        leaving them in the air."""
        self._land(keep=self._lookahead if launched else 0)

    def land_all(self) -> None:
        """Waits until nothing is in the air: afterwards every launched step has run on the device."""
        self._land(keep=0)

    def _land(self, *, keep: int) -> None:
        while len(self._in_air) > keep:
            pending, on_landed = self._in_air.popleft()
            on_landed(pending.result())
