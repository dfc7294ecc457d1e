"""CallLimit: a bound on the calls that one caller has open."""

from __future__ import annotations

from collections import Counter

from common.errors import ResourceExhausted


class CallLimit:
    """How many calls each caller has open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    def take(self, caller: str, *, name: str) -> None:
        """One call. name: of the caller, in messages. Raises ResourceExhausted naming the limit."""
        if self._open[caller] >= self._limit:
            raise ResourceExhausted(
                f"{name} has {self._open[caller]} calls open, the limit is {self._limit} (--max-calls-per-client)"
            )
        self._open[caller] += 1

    def give_back(self, caller: str) -> None:
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]
