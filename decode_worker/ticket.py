"""Ticket: one prompt's claim on pages, from Reserve until Commit or its end, for all of its n completions.

A local one is filled by this worker itself (decode_worker/local_prompts.py) from Prefill until its first tokens are made.

0               prefix_len                          input_len
| handle.pages  | page_ids: filled by the sender    |  spare: growth and copies, nobody writes to them yet
'- cached here -'- the last may be partly filled ---'
locked           owned, quarantined if it ends while   owned, freed at once if it ends
                 a copy may still write to them
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from common.core import Req
from common.engine.pages import pages_for
from common.engine.prefix_cache import PrefixHandle
from common.work_key import WorkKey
from decode_worker.commands import Prefill, Reserve
from decode_worker.precedence import Precedence, precedence_of
from decode_worker.states import State, Stateful


@dataclass(frozen=True)
class Room:
    """Pages one prompt takes. prompt: for the input; copies: of the partly filled page, for completions 2 to n; growth: for the
    first page of output beyond it, one per completion unless the output ends before."""

    prompt: int
    copies: int
    growth: int

    @property
    def total(self) -> int:
        return self.prompt + self.copies + self.growth

    @classmethod
    def of(cls, req: Req, page_size: int) -> Room:
        input_len = len(req.input_ids)
        prompt = pages_for(input_len, page_size)
        # The last token's KV is never computed.
        grows = pages_for(input_len + req.output_len - 1, page_size) > prompt
        copies = req.n - 1 if input_len % page_size and req.output_len > 1 else 0
        return cls(prompt, copies=copies, growth=req.n if grows else 0)


class Ticket(Stateful):
    """name: random, known to the sender only. call_id: the deferred Reserve. cancelled: those of its completions that are.
    deadline: of the lease. due: when a local one is too late."""

    def __init__(self, name: str, asked: Reserve | Prefill, *, call_id: int | None, page_size: int) -> None:
        super().__init__(State.RESERVED)
        self.name = name
        self.req = asked.req
        self.ids: list[int] = asked.req.input_ids.tolist()
        self.pair_id = "" if isinstance(asked, Prefill) else asked.pair_id
        self.transport = None if isinstance(asked, Prefill) else asked.transport
        self.verify = isinstance(asked, Reserve) and asked.verify
        self.is_local = isinstance(asked, Prefill)
        self.due = asked.deadline if isinstance(asked, Prefill) else math.inf
        self.call_id = call_id
        self.room = Room.of(asked.req, page_size)
        self.precedence: Precedence = precedence_of(asked.req)
        self.cancelled: set[WorkKey] = set()
        self.handle: PrefixHandle
        self.page_ids: list[int] = []
        self.spare: list[int] = []
        self.deadline = 0.0

    @property
    def keys(self) -> Iterable[WorkKey]:
        """Those of its completions."""
        return (self.req.key.for_completion(i) for i in range(self.req.n))

    @property
    def live_keys(self) -> list[WorkKey]:
        return [key for key in self.keys if key not in self.cancelled]

    def grant(self, handle: PrefixHandle, pages: list[int], *, deadline: float) -> None:
        """handle: locked; pages: the ticket's own from now on, as many as the handle leaves to be had of its room."""
        to_fill = self.room.prompt - len(handle.pages)
        self.handle, self.page_ids, self.spare, self.deadline = handle, pages[:to_fill], pages[to_fill:], deadline
        self.move_to(State.RECEIVING)
