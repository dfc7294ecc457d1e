"""Spells: a fault that lasts a while, and may come again before it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Spells:
    """Event loop only. Of those under way the worst counts; the end of one is not the others'."""

    def __init__(self, apply: Callable[[float], None], *, well: float) -> None:
        """apply(degree): makes it so bad from now on. well: the degree of no fault, the least."""
        self._apply = apply
        self._well = well
        self._degrees: list[float] = []

    async def last(self, degree: float, seconds: float) -> None:
        self._degrees.append(degree)
        self._apply(max(self._degrees))
        try:
            await asyncio.sleep(seconds)
        finally:
            self._degrees.remove(degree)
            self._apply(max(self._degrees, default=self._well))
