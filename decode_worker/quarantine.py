"""Quarantine: pages of ended tickets that a copy may still write to, until that is ruled out."""

from __future__ import annotations

from common.engine.pages import PagePool


class Quarantine:
    """Engine thread only. Each ticket's pages wait for the word of whoever writes to them: with shm and cuda_ipc the sender, or
    the end of its process; with grpc this worker's own event loop. Any other's word, and one about an unknown ticket, changes
    nothing."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[str, list[int]] = {}
        self._sender_of: dict[str, str] = {}
        """Ticket to pairing, for tickets whose sender writes itself."""
        self._since: dict[str, float] = {}
        """When each of those was first seen here by overdue_senders."""

    def put(self, ticket: str, pages: list[int], *, sender: str | None) -> None:
        """pages: the caller's, nobody's from now on. sender: the pairing that writes to them, None if the event loop does."""
        if not pages:
            return
        self._pool.quarantine(pages)
        self._pages[ticket] = pages
        if sender is not None:
            self._sender_of[ticket] = sender

    def loop_is_done(self, ticket: str) -> None:
        if ticket in self._pages and ticket not in self._sender_of:
            self._release(ticket)

    def sender_is_done(self, ticket: str) -> None:
        if ticket in self._sender_of:
            self._release(ticket)

    def sender_is_gone(self, pair_id: str) -> None:
        for ticket in [ticket for ticket, sender in self._sender_of.items() if sender == pair_id]:
            self._release(ticket)

    def overdue_senders(self, now: float, *, after_seconds: float) -> set[str]:
        """Pairings whose senders have owed their word on some ticket for so long, counted by calls to this."""
        self._since = {ticket: self._since.get(ticket, now) for ticket in self._sender_of}
        return {self._sender_of[ticket] for ticket, since in self._since.items() if now - since > after_seconds}

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._pages.values()))

    def _release(self, ticket: str) -> None:
        self._pool.release_quarantined(self._pages.pop(ticket))
        self._sender_of.pop(ticket, None)
