"""When a call's writer writes.

A write costs the router, and the client, far more than a token, so tokens are gathered: the first goes out at once, later ones
no sooner after the last write than a gap that grows with the number of streams. An idle stream's token never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WRITE_SECONDS = 80e-6
"""What one write costs router and client together on the machine this was measured on (bench/router.py)."""


def write_gap(active_streams: int) -> float:
    """Seconds between two writes of one stream, so that all of them together never take more than one core's time."""
    return active_streams * WRITE_SECONDS


class Outlet:
    """Wakes one call's writer. touch() and touch_now() are cheap, never block and may come in any number."""

    def __init__(self, *, active_streams: Callable[[], int]) -> None:
        self._active_streams = active_streams
        self._loop = asyncio.get_running_loop()
        self._next_write = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ready = False

    def touch(self, now: float) -> None:
        """There is something to write. now: time.monotonic() seconds."""
        if self._ready or self._timer is not None:
            return
        if now >= self._next_write:
            self.touch_now()
        else:
            self._timer = self._loop.call_later(self._next_write - now, self.touch_now)

    def touch_now(self) -> None:
        """There is something that must not wait."""
        self.close()
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when it is time to write. Then call wrote()."""
        if not self._ready:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._ready = False

    def wrote(self) -> None:
        self._next_write = time.monotonic() + write_gap(self._active_streams())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
