"""Recent: facts about ended things, remembered for a while."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_REMEMBERED = 100_000


class Recent(Generic[K, V]):
    """Keeps each fact for at least keep_seconds after it was last put, and at most MAX_REMEMBERED facts, oldest dropped first."""

    def __init__(self, keep_seconds: float, *, max_size: int = MAX_REMEMBERED) -> None:
        self._keep_seconds = keep_seconds
        self._max_size = max_size
        self._facts: dict[K, tuple[V, float]] = {}
        """In order of their end, which is the order of insertion."""

    def put(self, key: K, value: V, *, now: float) -> None:
        self._facts.pop(key, None)
        self._facts[key] = (value, now + self._keep_seconds)
        if len(self._facts) > self._max_size:
            del self._facts[next(iter(self._facts))]

    def get(self, key: K) -> V | None:
        fact = self._facts.get(key)
        return None if fact is None else fact[0]

    def __contains__(self, key: K) -> bool:
        return key in self._facts

    def __len__(self) -> int:
        return len(self._facts)

    def forget_old(self, now: float) -> None:
        while self._facts:
            oldest = next(iter(self._facts))
            if self._facts[oldest][1] > now:
                return
            del self._facts[oldest]
