"""TicketNames: whose tickets they were, for the log lines of calls that name nothing but a ticket."""

from __future__ import annotations

from common.core import Req
from common.logs import About

KEPT = 4096
"""The latest ones: a call about a ticket comes soon after its Reserve, or its line lacks the request's name."""


class TicketNames:
    """Event loop only."""

    def __init__(self) -> None:
        self._about: dict[str, About] = {}

    def put(self, ticket: str, req: Req) -> None:
        self._about[ticket] = about_req(req)
        if len(self._about) > KEPT:
            del self._about[next(iter(self._about))]

    def of(self, ticket: str) -> About:
        return self._about.get(ticket, About())


def about_req(req: Req) -> About:
    return About(req.request_id, req.uid, req.attempt)
