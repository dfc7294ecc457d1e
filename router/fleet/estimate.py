"""Estimate: a figure that a worker reports now and then, corrected by what this router knows of its own part in it since.

    reported   | others' | ours, ended since | ours, still there |      then scaled by how much of ours is still there,
    since                                                  + | ours, begun since |      and what has begun since is added

Scaling, because of ours only the size at its beginning is known: a decode worker's requests have grown since, a prefill worker's
have been partly computed. Of others it supposes that they end at the same pace as ours.
"""

from __future__ import annotations


class Estimate:
    """value >= 0: kept, for it is looked at far more often than it changes."""

    def __init__(self) -> None:
        self.value = 0.0
        self._reports = 0
        self._reported = 0.0
        self._had = self._left = self._new = 0

    @property
    def ours(self) -> int:
        """This router's part now, by its size at its beginning."""
        return self._left + self._new

    def report(self, value: float) -> None:
        """The worker says how it is; everything begun before counts as part of it."""
        self._reports += 1
        self._reported = value
        self._had = self._left = self._left + self._new
        self._new = 0
        self._weigh()

    def begin(self, amount: int) -> Part:
        """This router gives the worker something to do."""
        self._new += amount
        self._weigh()
        return Part(self, amount, self._reports)

    def _take(self, amount: int, begun_at: int) -> None:
        if begun_at == self._reports:
            self._new -= amount
        else:
            self._left -= amount
        self._weigh()

    def _weigh(self) -> None:
        self.value = self._reported * (self._left / self._had if self._had else 1.0) + self._new


class Part:
    """Something begun. Ended exactly once, however often it is asked to."""

    def __init__(self, whole: Estimate, amount: int, begun_at: int) -> None:
        self._whole, self._amount, self._begun_at = whole, amount, begun_at

    @property
    def amount(self) -> int:
        """What is left of it."""
        return self._amount

    def end(self, amount: int | None = None) -> None:
        """All of it that is left, or only so much."""
        gone = self._amount if amount is None else min(amount, self._amount)
        self._amount -= gone
        self._whole._take(gone, self._begun_at)
