"""Tombstones: keys that were cancelled before they were known, so that a late submission of one is not worked on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from common.work_key import WorkKey

KEEP_SECONDS = 30.0
MAX_KEPT = 100_000


class Tombstones:
    """Each is kept for KEEP_SECONDS, and at most MAX_KEPT, the oldest going first."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[WorkKey, float] = OrderedDict()

    def add(self, key: WorkKey) -> None:
        self._drop_old()
        self._until.pop(key, None)
        self._until[key] = self._clock() + KEEP_SECONDS
        if len(self._until) > MAX_KEPT:
            self._until.popitem(last=False)

    def __contains__(self, key: WorkKey) -> bool:
        self._drop_old()
        return key in self._until

    def __len__(self) -> int:
        return len(self._until)

    def _drop_old(self) -> None:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
