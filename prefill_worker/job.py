"""Job: one request as the prefill engine sees it.

0              cached_tokens                          input_len
| prefix cache | computed here, chunk by chunk         |
'- locked by --'- owned by this job until Forget ------'
   req.cache_handle

0        prefix_len                                   input_len
| D has  | destination.page_ids[0], [1], ...           |
           '- sent -' pages already copied or announced
"""

from __future__ import annotations

from array import array

from common.core import Req
from common.work_key import WorkKey
from prefill_worker.commands import Destination
from prefill_worker.events import Page
from prefill_worker.states import State, Stateful


class Job(Stateful):
    """Engine thread only. arrival: counts admissions asked for, so that the oldest is known."""

    def __init__(self, req: Req, *, arrival: int, call_id: int | None) -> None:
        super().__init__()
        self.req = req
        self.ids = array("i", req.input_ids.tolist())
        self.arrival = arrival
        self.call_id = call_id
        self.pages: list[int] = []
        """All pages of the input in order: the locked prefix's, then its own."""
        self.destination: Destination | None = None
        self.deadline = float("inf")
        self.sent = 0
        self.page_crc32: list[int] = []
        self.has_started = False
        self.cached_tokens = 0
        self.is_broken = False

    @property
    def key(self) -> WorkKey:
        return self.req.key

    @property
    def input_len(self) -> int:
        return len(self.ids)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Who goes first: priority, then arrival at the router; never equal for two jobs."""
        return (-self.req.priority, self.req.uid, self.req.router_epoch, self.req.attempt)

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return max(0, self.input_len - self.req.cached_len)

    @property
    def is_computing(self) -> bool:
        """Broken ones are not: they only wait for Forget."""
        return self.state is State.COMPUTING and not self.is_broken

    def take_ready(self, ready: int, *, page_size: int) -> list[Page]:
        """The pages not sent before among the destination's first `ready`; they count as sent from now on."""
        assert self.destination is not None
        first = self.destination.prefix_len // page_size
        pages = [Page(index, self.pages[first + index]) for index in range(self.sent, ready)]
        self.sent = max(self.sent, ready)
        return pages
