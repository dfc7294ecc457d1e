"""Endings: what is remembered of tickets that have ended, for as long as somebody may come back to them."""

from __future__ import annotations

from datetime import timedelta

from common.errors import Aborted, NotFound
from common.recent import Recent
from common.work_key import WorkKey


class Endings:
    """Engine thread only. now: the engine's clock, in seconds."""

    def __init__(self, lease: timedelta) -> None:
        """Cancelled keys are remembered for one lease, tickets for two."""
        seconds = lease.total_seconds()
        self._cancelled: Recent[WorkKey, None] = Recent(seconds)
        self._committed: Recent[str, None] = Recent(2 * seconds)
        self._lost: Recent[str, str] = Recent(2 * seconds)
        """Why, of tickets that had been granted and were not committed."""

    def cancelled(self, key: WorkKey, *, now: float) -> None:
        """Whether it had a ticket or not: one may be asked for yet."""
        self._cancelled.put(key, None, now=now)

    def committed(self, ticket: str, *, now: float) -> None:
        self._committed.put(ticket, None, now=now)

    def lost(self, ticket: str, why: str, *, now: float) -> None:
        self._lost.put(ticket, why, now=now)

    def was_cancelled(self, key: WorkKey) -> bool:
        return key in self._cancelled

    def was_committed(self, ticket: str) -> bool:
        return ticket in self._committed

    def check_committed(self, ticket: str) -> None:
        """Raises Aborted saying why it ended otherwise, NotFound if nothing is known of it."""
        if ticket in self._committed:
            return
        if (why := self._lost.get(ticket)) is not None:
            raise Aborted(f"the ticket has ended: {why}")
        raise NotFound("no such ticket")

    def forget_old(self, now: float) -> None:
        for memory in (self._cancelled, self._committed, self._lost):
            memory.forget_old(now)
