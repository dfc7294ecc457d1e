"""Job: one request as the prefill engine sees it. What it computes: common/engine/prompt.py.

0        prefix_len                                   input_len
| D has  | destination.page_ids[0], [1], ...           |
           '- sent -' pages already copied or announced
"""

from __future__ import annotations

from common.core import Req
from common.engine.prompt import Prompt
from common.work_key import WorkKey
from prefill_worker.commands import Destination
from prefill_worker.events import Page
from prefill_worker.states import State, Stateful


class Job(Stateful, Prompt):
    """Engine thread only. Owns its pages until Forget. arrival: counts admissions asked for, so that the oldest is known."""

    def __init__(self, req: Req, *, arrival: int, call_id: int | None) -> None:
        Stateful.__init__(self)
        Prompt.__init__(self, req)
        self.arrival = arrival
        self.call_id = call_id
        self.destination: Destination | None = None
        self.deadline = float("inf")
        self.sent = 0
        self.page_crc32: list[int] = []

    @property
    def key(self) -> WorkKey:
        return self.req.key

    @property
    def precedence(self) -> tuple[int, int, int, int]:
        """Who goes first: priority, then arrival at the router; never equal for two jobs."""
        return (-self.req.priority, self.req.uid, self.req.router_epoch, self.req.attempt)

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
