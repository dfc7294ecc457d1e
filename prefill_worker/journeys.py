"""Journeys: every request under way on this worker, found by the key of any of its completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from common.errors import Full, PdserveError
from common.recent import Recent
from common.work_key import WorkKey
from prefill_worker.journey import Journey, Tools
from prefill_worker.order import Order
from prefill_worker.report import Report

REMEMBER_SECONDS: Final = 30.0
"""How long a cancel is known that came before its submission."""


class Journeys:
    """Event loop only; owns the journeys' tasks."""

    def __init__(self, *, tools: Tools, max_requests: int) -> None:
        """max_requests: under way at once, those in line included. As many again may be at their end, of which their routers know
        nothing: they count them as gone."""
        self._tools = tools
        self._max_requests = max_requests
        self._journeys: set[Journey] = set()
        self._by_key: dict[WorkKey, Journey] = {}
        self._cancelled: Recent[WorkKey, None] = Recent(REMEMBER_SECONDS)

    def __len__(self) -> int:
        return len(self._journeys)

    def __iter__(self) -> Iterator[Journey]:
        """Those of one moment."""
        return iter(list(self._journeys))

    def begin(self, order: Order, *, report: Report) -> Journey | None:
        """Starts on a request; None if it was cancelled before it came (all its completions were). A key already here is the same
        submission again, and ignored. Raises Full when there are too many."""
        key = order.req.key
        keys = [key.for_completion(offset) for offset in range(order.req.n)]
        self._cancelled.forget_old(self._tools.clock())
        dead = [key for key in keys if key in self._cancelled]
        if len(dead) == len(keys) or key in self._by_key:
            return None
        if self._is_full():
            raise Full(f"this prefill worker has {self._max_requests} requests, which is its limit")
        journey = Journey(order, tools=self._tools, report=report)
        self._journeys.add(journey)
        self._by_key.update(dict.fromkeys(journey.keys, journey))
        journey.task.add_done_callback(lambda _: self._forget(journey))
        for key in dead:
            journey.cancel(key)
        return journey

    def cancel(self, key: WorkKey) -> None:
        """Stops work on a completion in whatever state; an unknown one is remembered: a later submission of it is ignored."""
        if (journey := self._by_key.get(key)) is not None:
            journey.cancel(key)
        else:
            self._cancelled.put(key, None, now=self._tools.clock())

    def end_all(self, cause: PdserveError) -> None:
        for journey in list(self._journeys):
            journey.end(cause)

    def on_event(self, event: Any) -> None:
        """Something the engine says about one request; about one that is unknown by now it is of no interest."""
        if (journey := self._by_key.get(event.key)) is not None:
            journey.on_event(event)

    async def all_done(self, *, timeout_seconds: float) -> bool:
        """Waits until none is left; False if the time did not do."""
        tasks = [journey.task for journey in self._journeys]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=timeout_seconds)
        return not pending

    def _is_full(self) -> bool:
        if (count := len(self._journeys)) < self._max_requests:
            return False
        return count >= 2 * self._max_requests or sum(not each.is_ending for each in self._journeys) >= self._max_requests

    def _forget(self, journey: Journey) -> None:
        self._journeys.discard(journey)
        for key in journey.keys:
            del self._by_key[key]
