"""When a pretended step takes place, and how its tokens say so: by their ids."""

from __future__ import annotations

import asyncio
import time

IDS = 256
"""A token's id is the time of its step in ticks, modulo this: a token's age is known up to so many ticks."""


def age(token_id: int, now: float, *, tick: float) -> float:
    """Seconds since the step that made the token, to a tick. now: time.monotonic() seconds, of any process of this machine."""
    return ((now / tick - token_id) % IDS - 0.5) * tick


class Steps:
    """The clock of what emits: a step every gap, also after one that was late."""

    def __init__(self, *, gap: float, tick: float) -> None:
        """Seconds between two steps, 0: without a pause; and of a tick."""
        self._gap, self._tick = gap, tick
        self._due = 0.0

    @property
    def is_paced(self) -> bool:
        return self._gap > 0

    def begin(self) -> None:
        """The first step after a time without any is due now."""
        self._due = time.monotonic()

    async def due(self) -> None:
        if self.is_paced:
            await asyncio.sleep(max(0.0, self._due - time.monotonic()))
            self._due += self._gap
        else:
            await asyncio.sleep(0)

    def stamp(self) -> int:
        """A step happens now; the id of its tokens."""
        return int(time.monotonic() / self._tick) % IDS
