"""Completion: one sequence being decoded, and how a committed ticket becomes its completions.

0                        input_len      cached_len    device_len
| whole prompt pages | partial page ... | growth ... |
'- handle.pages -----'- own -------------------------'   pages == handle.pages + own
   cached, locked        this completion's alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.core import Req
from common.engine.pages import PagePool, pages_for
from common.engine.prefix_cache import PrefixHandle
from common.token_ids import with_id
from common.work import TokenOut
from decode_worker.precedence import Precedence, precedence_of
from decode_worker.states import State, Stateful
from decode_worker.ticket import Ticket


class Completion(Stateful):
    """req.cache_handle is locked. own: pages after the handle's. repeat: the first token, until it went out with the first
    step's. in_flight: launched steps that have it and whose tokens have not been read."""

    def __init__(self, req: Req, own: list[int], repeat: TokenOut, *, page_size: int) -> None:
        super().__init__(State.COMMITTED)
        self.req = req
        self.own = own
        self.repeat: TokenOut | None = repeat
        self.in_flight = 0
        self.precedence: Precedence = precedence_of(req)
        self._page_size = page_size

    @property
    def pages(self) -> list[int]:
        handle: PrefixHandle = self.req.cache_handle
        return handle.pages + self.own

    @property
    def num_pages(self) -> int:
        return len(self.req.cache_handle.pages) + len(self.own)

    @property
    def needs_page(self) -> bool:
        """The next step's token has no place yet."""
        return pages_for(self.req.device_len, self._page_size) > self.num_pages

    def give_back(self, pool: PagePool) -> None:
        """The whole pages of what is computed go to the prefix cache, the rest is freed. Not while anything is in flight."""
        assert self.in_flight == 0, f"{self.req} is still in {self.in_flight} launched steps"
        self.move_to(State.DONE)
        # A step whose token was dropped computed the KV of the last token that was read, at most.
        whole = min(self.req.cached_len, len(self.req.input_ids)) // self._page_size
        pages = self.pages
        handle = pool.insert(self.req.input_ids[: whole * self._page_size].tolist(), pages[:whole], self.req.cache_handle)
        pool.unlock(handle)
        pool.free(pages[whole:])


def split(
    ticket: Ticket, firsts: Sequence[tuple[int, TokenOut]], *, pool: PagePool, copy_page: Callable[[int, int], None]
) -> list[Completion]:
    """The completions of a ticket that has all its KV; every page of the ticket ends up with one of them, cached or free.

    firsts: (which of the n, its first token) of those to run; may be empty. copy_page(source, destination).
    """
    size, spare = pool.page_size, list(ticket.spare)
    pages = ticket.handle.pages + ticket.page_ids
    whole = len(ticket.ids) // size
    handle, partial = pool.insert(ticket.ids[: whole * size], pages[:whole], ticket.handle), pages[whole:]
    completions: list[Completion] = []
    for which, first in firsts:
        own = list(partial)
        if completions and partial:
            own = [spare.pop()]
            copy_page(partial[0], own[0])
        if ticket.room.growth:
            own.append(spare.pop())
        locked = pool.match(ticket.ids, max_len=whole * size)
        completions.append(Completion(_continued(ticket.req, which, first, locked), own, first, page_size=size))
    pool.unlock(handle)
    pool.free(spare if completions else spare + partial)
    return completions


def _continued(req: Req, which: int, first: TokenOut, handle: PrefixHandle) -> Req:
    """The state of completion number `which` after its first token, which has no KV yet."""
    return Req(
        input_ids=with_id(req.input_ids, first.token_id),
        table_idx=-1,
        cached_len=len(req.input_ids),
        output_len=req.output_len - 1,
        uid=req.uid + which,
        sampling_params=req.sampling_params,
        cache_handle=handle,
        prompt_len=req.prompt_len,
        router_epoch=req.router_epoch,
        attempt=req.attempt,
        completion=req.completion + which,
        logprobs=req.logprobs,
        priority=req.priority,
        request_id=req.request_id,
        traceparent=req.traceparent,
    )
