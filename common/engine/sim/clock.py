"""SimClock: one simulated engine's time.

    wall     ----|=== a step is computed (bookkeeping, microseconds) ===|......... the loop does other things ........|---
    engine   ----| begin_step                                  busy_until |------------------------------------------->|
                 '--------------- spend(seconds) -----------------------'

A step is bookkeeping that is done at once, and then the engine is busy until busy_until: its results are not told before, and
no command is taken. While a step is under way now() is its end, which is when its results count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

CATCH_UP_SECONDS: Final = 0.02
"""A step that follows another begins when that one ended, though the timer was late, by at most so much. Beyond it the machine is
too slow for what it simulates, and lag_seconds grows."""


class SimClock:
    """slowness: what every step's time is multiplied with, for fault injection."""

    def __init__(self, *, time_scale: float = 1.0, wall: Callable[[], float] = time.monotonic) -> None:
        """time_scale: simulated seconds per second of the wall clock."""
        self.busy_until = 0.0
        self.lag_seconds = 0.0
        self.slowness = 1.0
        self._time_scale = time_scale
        self._wall = wall
        self._step_began = 0.0

    def now(self) -> float:
        """Seconds of the wall clock, or the end of the step under way."""
        return max(self._wall(), self.busy_until)

    @property
    def is_busy(self) -> bool:
        return self.busy_until > self._wall()

    def wall_seconds(self, seconds: float) -> float:
        """So much simulated time on the wall clock."""
        return seconds * self.slowness / self._time_scale

    def begin_step(self, *, follows: bool) -> None:
        """follows: right after the one before, with no idle time between."""
        now = self._wall()
        late = now - self.busy_until
        if late < 0 or (follows and late <= CATCH_UP_SECONDS):
            self._step_began = self.busy_until
            return
        self._step_began = now
        self.lag_seconds += late if follows else 0.0

    def spend(self, seconds: float) -> None:
        """The step under way takes so long."""
        self.busy_until = self._step_began + self.wall_seconds(seconds)
