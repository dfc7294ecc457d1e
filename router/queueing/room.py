"""Which workers have room for one more request: functions of values. Without room it waits here, not in their queues.

A prefill worker has room while it has less than a bound of prompt tokens to compute, whatever the next prompt's size, so that a
large one waits for no more than its turn. A decode worker has room while the pages that a request begins with are available.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.fleet.placement import Pair, Seats
from router.fleet.workers import Worker

STEPS = 2
"""A prefill worker should have as much to do as it computes in so many steps: one under way, one there when that ends."""
MIN_TOKENS = 2048
"""And never less than this, where a step is small or its size not known."""
TURNS = 2
"""Requests a prefill worker may have: so many times what it may hold at once, and no more than it says that it takes."""


@dataclass(frozen=True)
class RoomRule:
    """queue_tokens: the bound; None: STEPS of the worker's steps."""

    queue_tokens: int | None = None

    def takes_prompt(self, worker: Worker) -> bool:
        bound = self.queue_tokens or max(MIN_TOKENS, STEPS * worker.profile.chunk_tokens)
        if worker.queued_tokens >= bound:
            return False
        if worker.role == "decode":
            return worker.takes_prompt_alone
        limit = worker.profile.max_requests
        if limit and worker.completions.ours >= limit:  # Which a report that has crossed them may not know of yet.
            return False
        places = TURNS * max(1, worker.profile.max_running)
        return worker.requests < (min(places, limit) if limit else places)

    def has_room(self, pair: Pair, *, pages: int | None) -> bool:
        """Both have, of a choice among a request's seats. pages: as below."""
        first, decode = pair
        if not self.takes_prompt(first):
            return False
        holder = first if first.profile.local_prefill else decode
        return holder is None or holder.has_pages(pages)

    def open_seats(self, seats: Seats, *, pages: int | None) -> Seats | None:
        """Those of the workers that have room; None if no choice is left. pages: that the decode worker should have available;
        None: it may have none."""
        return Seats.of(
            tuple(worker for worker in seats.prefills if self.takes_prompt(worker)),
            tuple(worker for worker in seats.decodes if worker.has_pages(pages)),
            tuple(worker for worker in seats.alone if self.takes_prompt(worker) and worker.has_pages(pages)),
            needs_decode=bool(seats.decodes),
        )
