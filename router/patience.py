"""Patience: notices a write that its reader does not take.

gRPC takes a message once the reader's window has room for it, so a write that lasts is a client that does not read. One timer a
call looks after all of its writes: arming one for each would cost more than the write's own bookkeeping.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Patience:
    """Event loop only."""

    def __init__(self, limit_seconds: float, *, on_end: Callable[[], None]) -> None:
        """on_end: called once, when a write has lasted for limit_seconds."""
        self._limit = limit_seconds
        self._on_end = on_end
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A write begins."""
        self._began = time.monotonic()
        if self._timer is None:
            self._arm(self._limit)

    def done(self) -> None:
        self._began = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._began is None:
            return  # The next write arms it again.
        left = self._began + self._limit - time.monotonic()
        if left > 0:
            self._arm(left)
        else:
            self._on_end()
