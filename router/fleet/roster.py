"""Roster: the workers that take requests, sorted once by what they can do. It is right until one of them changes."""

from __future__ import annotations

from collections.abc import Iterable

from router.fleet.placement import Ask, Seats, placeable, seats_among
from router.fleet.workers import Worker


class Roster:
    """computing: those that compute prompts. has_local: some decode worker may compute short ones."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = placeable(workers)
        self.computing = tuple(worker for worker in self._workers if worker.computes_prompts)
        self.has_local = any(worker.profile.local_prefill_tokens for worker in self._workers)
        self._smallest_pool = min((worker.profile.total_pages for worker in self._workers), default=0)
        self._seats = {needs: seats_among(self._workers, Ask(pages=0, needs_decode=needs)) for needs in (True, False)}

    def seats(self, ask: Ask) -> Seats | None:
        """Who can take it; None while there is no worker of a needed role whose pool can hold it."""
        if ask.avoid or ask.pages > self._smallest_pool:
            return seats_among(self._workers, ask)
        return self._seats[ask.needs_decode]
