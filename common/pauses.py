"""Pauses: whether this process itself stood still until a moment ago.

A process that is stopped and resumes, or is given no processor for long, finds its timers run out before it has read what came
meanwhile. So it would take others for silent that have answered in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

TICK_SECONDS: Final = 0.1
LONG_SECONDS: Final = 0.5
"""A tick that comes so late was a pause; it is less than any silence that is believed."""
FRESH_SECONDS: Final = 0.3
"""How long after its end what timers say is doubtful: they all run out at once."""


class Pauses:
    """Event loop only, whose standing still it measures. Ticks from begin() to close()."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._ended_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._looked_at = self._clock()
        self._arm()

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def just_ended(self) -> bool:
        """A pause has, or does with this very call."""
        now = self._look()
        return now - self._ended_at < FRESH_SECONDS

    def _look(self) -> float:
        now = self._clock()
        if now - self._looked_at >= TICK_SECONDS + LONG_SECONDS:
            self._ended_at = now
        self._looked_at = now
        return now

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._look()
        self._arm()
