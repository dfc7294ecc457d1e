"""Conditional disaggregation: a short prompt goes to a decode worker alone while the prefill workers are busy.

Moving a short prompt's KV saves the decode worker little, and waiting for a prefill worker costs the request much. (NVIDIA Dynamo
does so under that name; DistServe's authors, OSDI 2024, describe the two phases' interference that it trades for.) Only decode
workers with --local-prefill short take part, which stay ordinary partners of pairs.
"""

from __future__ import annotations

from router.fleet.placement import Ask, Pair, Seats
from router.fleet.prefix_map import PrefixMap
from router.fleet.prompt_blocks import block_tokens
from router.fleet.workers import Worker, least_full


class LocalPrefill:
    """Knows which prompts it has sent where, so what decode workers probably have cached."""

    def __init__(self, *, queue_tokens: int) -> None:
        """queue_tokens: what every prefill worker has to compute at least when short prompts go elsewhere."""
        self._queue_tokens = queue_tokens
        self._known = PrefixMap()

    def pair_for(self, seats: Seats, ask: Ask, *, pages: int | None) -> Pair | None:
        """The least full of the decode workers that may compute the prompt themselves now; None if it is none's. pages: see
        RoomRule.open_seats."""
        offers = [worker for worker in seats.decodes if worker.profile.local_prefill_tokens]
        if not offers or any(worker.queued_tokens < self._queue_tokens for worker in seats.prefills):
            return None
        free = [worker for worker in offers if worker.has_pages(pages) and self._has_time(worker) and self._is_short(worker, ask)]
        if not free:
            return None
        worker = least_full(free)
        return Pair(worker, worker)

    def took(self, pair: Pair, ask: Ask) -> None:
        """The pair has got the request."""
        if (decode := pair.decode) is not None and decode.profile.local_prefill_tokens:
            self._known.note(decode.id, ask.prompt.names(tokens=_tokens(decode)), capacity=_blocks(decode))

    def left(self, worker_id: str) -> None:
        """The worker is gone."""
        self._known.forget(worker_id)

    def flushed(self) -> None:
        """The workers have dropped their prefix caches."""
        self._known.clear()

    def _has_time(self, worker: Worker) -> bool:
        """It computes one short prompt at a time, or two, and has a place for it and in its batch for what comes of it."""
        has_place = worker.takes_prompt_alone and worker.requests < worker.profile.max_running
        return has_place and worker.queued_tokens < worker.profile.local_prefill_tokens

    def _is_short(self, worker: Worker, ask: Ask) -> bool:
        limit = worker.profile.local_prefill_tokens
        if len(ask.prompt) < limit:
            return True
        tokens = _tokens(worker)
        return len(ask.prompt) - tokens * self._known.matched(worker.id, ask.prompt.names(tokens=tokens)) < limit


def _tokens(worker: Worker) -> int:
    return block_tokens(worker.profile.compatibility.page_size)


def _blocks(worker: Worker) -> int:
    """That its pool holds."""
    return worker.profile.total_pages * worker.profile.compatibility.page_size // _tokens(worker)
