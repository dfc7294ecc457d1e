"""Slots: which complete pages lie in a slot of shared memory for the event loop to send, and which wait in line for one.

    put(pages) --> in line --> in a slot, announced (PagesReady) --> free(slots), when sent
                   '------------- forget(key), from anywhere -----------'

Nothing here blocks: pages in line stay in the pool, where their request holds them until it is forgotten. One whose receiver is
slow has at most its share of the slots, so that it holds up nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from common.engine.handle import Emit
from common.work_key import WorkKey
from prefill_worker.events import Page, PagesReady

if TYPE_CHECKING:
    from common.handoff.staging import Staging


class Slots:
    """Engine thread only."""

    def __init__(self, staging: Staging, emit: Emit) -> None:
        self._staging = staging
        self._emit = emit
        self._free = list(range(staging.num_slots))
        self._share = max(1, staging.num_slots // 4)
        self._line: dict[WorkKey, deque[Page]] = {}
        self._taken: dict[WorkKey, set[int]] = {}

    def put(self, key: WorkKey, pages: Iterable[Page]) -> None:
        """These pages of a request are complete and stay as they are until forget(key)."""
        self._line.setdefault(key, deque()).extend(pages)
        self._fill()

    def free(self, key: WorkKey, slots: Iterable[int]) -> None:
        """These are sent. Slots of a request that was forgotten are free already."""
        taken = self._taken.get(key, set())
        sent = taken.intersection(slots)
        taken -= sent
        self._free.extend(sent)
        self._fill()

    def forget(self, key: WorkKey) -> None:
        """Nobody reads this request's slots any more, and none of its pages is to be sent."""
        self._line.pop(key, None)
        self._free.extend(self._taken.pop(key, ()))
        self._fill()

    def check(self) -> None:
        """Every slot has one owner."""
        taken = [slot for slots in self._taken.values() for slot in slots]
        assert sorted([*self._free, *taken]) == list(range(self._staging.num_slots)), f"{self._free}, {self._taken}"

    def _fill(self) -> None:
        """Gives free slots to those in line, the first ones first."""
        for key in list(self._line):
            if not self._free:
                return
            waiting, taken = self._line[key], self._taken.setdefault(key, set())
            ready = []
            while waiting and self._free and len(taken) < self._share:
                page, slot = waiting.popleft(), self._free.pop()
                self._staging.to_slot(page.page_id, slot)
                taken.add(slot)
                ready.append(Page(page.page_index, slot))
            if not waiting:
                del self._line[key]
            if ready:
                self._emit(PagesReady(key, tuple(ready)))
