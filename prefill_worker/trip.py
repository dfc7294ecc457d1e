"""Trip: when one request reached what here, and what it carried to the decode worker. For those who watch.

arrived -- queue --> admitted -- reserve --> reserved -- compute --> computed -- commit --> handed over
                                             '------------------- transfer -------------------'
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from common.handoff.base import Transport


class Mark(Enum):
    """ADMITTED: has pages here. RESERVED: has the decode worker's too, if it needs any. COMPUTED: its first tokens are made.
    COMMITTING: and some completion is to be decoded."""

    ARRIVED = auto()
    ADMITTED = auto()
    RESERVED = auto()
    COMPUTED = auto()
    COMMITTING = auto()
    HANDED_OVER = auto()


class Trip:
    """Event loop only. transport: once it has pages at a decode worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds."""
        self._clock = clock
        self._at: dict[Mark, float] = {}
        self.transport: Transport | None = None
        self.reach(Mark.ARRIVED)

    def reach(self, mark: Mark) -> None:
        self._at[mark] = self._clock()

    def at(self, mark: Mark) -> float | None:
        """None: not reached."""
        return self._at.get(mark)

    def seconds(self, begin: Mark, end: Mark) -> float | None:
        """None unless it reached both."""
        return self._at[end] - self._at[begin] if begin in self._at and end in self._at else None
