"""Uids: the numbers of completions, in order of arrival, also beside those of other routers."""

from __future__ import annotations

import time
from collections.abc import Callable


class Uids:
    """Workers serve the lowest first. Counted from 1 on, a router's uids would go before those of every router that has run for
    longer, whose requests would starve; so they never fall behind the clock, in milliseconds since 1970."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._next = 1

    def take(self, n: int) -> range:
        """n consecutive ones, higher than all before."""
        first = max(self._next, int(self._clock() * 1000))
        self._next = first + n
        return range(first, self._next)
