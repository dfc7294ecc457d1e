"""Census: what a decode engine has at the moment: told when it has changed, and checked against the pool."""

from __future__ import annotations

from common.engine.flights import Flights
from common.engine.handle import Emit
from common.engine.pages import PagePool
from common.work import PageCounts
from decode_worker.decoding import Decoding
from decode_worker.events import StateCounts, Stats
from decode_worker.local_prompts import LocalPrompts
from decode_worker.tickets import Tickets


class Census:
    """Engine thread only. Counts, and changes nothing."""

    def __init__(
        self, pool: PagePool, *, tickets: Tickets, prompts: LocalPrompts, decoding: Decoding, flights: Flights, emit: Emit
    ) -> None:
        self._pool = pool
        self._tickets = tickets
        self._prompts = prompts
        self._decoding = decoding
        self._flights = flights
        self._emit = emit
        self._reported: Stats | None = None

    @property
    def is_empty(self) -> bool:
        """No request has anything here, not even a step in the air."""
        return len(self._tickets) + len(self._decoding) + len(self._flights) == 0

    def check(self) -> PageCounts:
        """Raises AssertionError, which ends the engine, if a page was lost or has two owners."""
        self._pool.check()
        counts = self._pool.counts()
        assert counts.quarantined == self._tickets.num_quarantined, f"{counts}, {self._tickets.num_quarantined} in quarantine"
        if self.is_empty:
            self._pool.check_idle()
        return counts

    def report(self) -> None:
        """Tells the event loop if something has changed."""
        reservations = self._tickets.reservations
        running = self._decoding.num_running + len(self._prompts)
        stats = Stats(
            running=running,
            waiting=len(self._tickets) + len(self._decoding) - running,
            pages=self._pool.counts(),
            queued_tokens=reservations.queued_tokens + self._prompts.remaining_tokens,
            states=StateCounts(*reservations.num_by_state, *self._decoding.num_by_state),
            computed_tokens=self._prompts.computed_tokens,
        )
        if stats != self._reported:
            self._reported = stats
            self._emit(stats)
