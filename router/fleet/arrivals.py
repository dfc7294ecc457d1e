"""Arrivals: workers that have said that they are starting, and are not registered yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.work import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Arrival:
    """since: clock seconds."""

    role: Role
    since: float


class Arrivals:
    """Event loop only."""

    def __init__(self, clock: Callable[[], float], *, on_change: Callable[[], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._coming: list[Arrival] = []

    @contextmanager
    def announced(self, role: Role) -> Iterator[None]:
        """One is coming for as long as the block runs."""
        arrival = Arrival(role, self._clock())
        self._coming.append(arrival)
        log.info("a %s worker is starting", role)
        self._on_change()
        try:
            yield
        finally:
            self._coming.remove(arrival)
            self._on_change()

    @property
    def coming(self) -> tuple[Arrival, ...]:
        return tuple(self._coming)

    def has(self, role: Role) -> bool:
        return any(arrival.role == role for arrival in self._coming)
