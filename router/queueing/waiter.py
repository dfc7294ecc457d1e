"""Waiter: one attempt that waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import PdserveError
from router.fleet.placement import Ask, Pair


class Place(NamedTuple):
    """Where in line: sorts ascending. start: the start tag of fair queueing. A request keeps its place over all its attempts."""

    minus_priority: int
    start: float
    uid: int


@dataclass(eq=False)
class Waiter:
    """go(pair) or refuse(error) is called once, unless it leaves before.

    tokens: of the prompt; output_tokens: at most, of one completion. pages: that a decode worker should have available.
    deadline: time.monotonic() seconds.
    is_begun: it has had an attempt. place: None until it is in line for the first time.
    bypassed: how many that stood behind it have gone before it.
    timer, pardon, search: the RequestQueue's, while it waits; pardon: until it avoids nobody any more; search: while no worker
    could ever take it.
    """

    ask: Ask
    uid: int
    priority: int
    tenant: str
    tokens: int
    output_tokens: int
    pages: int
    deadline: float | None
    go: Callable[[Pair], None]
    refuse: Callable[[PdserveError], None]
    is_begun: bool = False
    place: Place | None = None
    bypassed: int = 0
    timer: asyncio.TimerHandle | None = None
    pardon: asyncio.TimerHandle | None = None
    search: asyncio.Task[None] | None = None

    def unwatch(self) -> None:
        """It waits no more."""
        for watch in (self.timer, self.pardon, self.search):
            if watch is not None:
                watch.cancel()
        self.timer = self.pardon = self.search = None
