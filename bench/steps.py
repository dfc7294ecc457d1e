"""When a pretended step takes place, and how the client learns of it: by a file of times that both map into memory."""

from __future__ import annotations

import asyncio
import time
from typing import TypeAlias

IDS = 256
"""A step's number modulo this is the id of every token it makes, and the place of its time in the file."""
Times: TypeAlias = "memoryview[float]"


class Steps:
    """One clock for whatever emits in this process."""

    def __init__(self, times: Times, *, rate: float) -> None:
        """times: time.monotonic() seconds. rate: tokens per second over all streams; 0: without a pause."""
        self._times = times
        self._rate = rate
        self._step = 0

    async def next(self, *, tokens: int) -> int:
        """Waits until a step of so many tokens is due; returns the id of its tokens. Then call stamp()."""
        if self._rate:
            await asyncio.sleep(max(0.0, self._times[self._step % IDS] + tokens / self._rate - time.monotonic()))
        self._step += 1
        return self._step % IDS

    def stamp(self) -> None:
        """The step happens now."""
        self._times[self._step % IDS] = time.monotonic()
