"""SimLink and SimSender: a handoff between simulated workers takes a transfer's time and moves pages' tags, not their KV.

The greeting is shm's (common/handoff/base.py): the decode worker's pool, of 16 bytes a page, is mapped for as long as the socket
is open, so tickets, leases, quarantine and the proof that no late write is possible are the real ones. The event loop writes, for
a simulated engine has no thread of its own that could.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from common.errors import Unavailable
from common.handoff.base import page_checksum
from common.handoff.page_sender import Sent
from common.handoff.shm_link import ShmLink
from common.handoff.shm_sender import ShmSender

SHORTEST_SLEEP_SECONDS: Final = 0.0005
"""The loop's timers count in milliseconds; less than half of one would be no wait."""


class SimLink:
    """A mapped pool. Raises FailedPrecondition if it cannot be mapped."""

    def __init__(self, link: ShmLink, transfers: SimTransfers, *, page_bytes: int) -> None:
        """Takes over link, also when it raises."""
        self._link = link
        try:
            self._pool = ShmSender(link.descriptor, pool_bytes=link.pool_bytes, page_bytes=page_bytes)
        except BaseException:
            link.close()
            raise
        link.close_descriptor()
        transfers.links.add(self)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """See Link in prefill_worker/link.py."""
        self._link.watch(on_gone)

    def write(self, page_id: int, tag: memoryview) -> None:
        self._pool.write(page_id, tag)

    def close(self) -> None:
        """Unmaps, then says so. Idempotent."""
        self._pool.close()
        self._link.close()


class SimTransfers:
    """How a prefill worker's simulated transfers go. base_seconds, page_seconds: of the wall clock, as they are now. failing: the
    share of them that breaks, for fault injection."""

    def __init__(self, *, base_seconds: Callable[[], float], page_seconds: Callable[[], float], seed: int = 0) -> None:
        self.base_seconds = base_seconds
        self.page_seconds = page_seconds
        self.failing = 0.0
        self.links: WeakSet[SimLink] = WeakSet()
        """Those open, for fault injection."""
        self.rng = random.Random(seed)


class SimSender:
    """A PageSender. One page after the other, and base_seconds with the last."""

    def __init__(
        self,
        link: SimLink,
        transfers: SimTransfers,
        *,
        page_ids: tuple[int, ...],
        read_page: Callable[[int], memoryview],
        deadline: Callable[[], float],
        verify: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """link: its write() is all that is used. page_ids: the receiver's. read_page: the tag of one of ours. deadline: of the
        lease, in clock seconds."""
        self._link = link
        self._transfers = transfers
        self._page_ids = page_ids
        self._read_page = read_page
        self._deadline = deadline
        self._verify = verify
        self._clock = clock
        self._ready: deque[tuple[int, int]] = deque()
        self._wake = asyncio.Event()
        self._owed_seconds = 0.0

    def put(self, page_index: int, page_id: int) -> None:
        self._ready.append((page_index, page_id))
        self._wake.set()

    async def run(self) -> Sent:
        """Raises Unavailable when the lease ends before every page is sent, or by fault injection."""
        breaks_at = self._breaks_at()
        checksums = [0] * len(self._page_ids)
        for count in range(len(self._page_ids)):
            if count == breaks_at:
                raise Unavailable("the simulated transfer broke: fault injection")
            page_index, page_id = await self._next()
            tag = self._read_page(page_id)
            await self._spend(self._transfers.page_seconds() + (self._is_last(count) * self._transfers.base_seconds()))
            if self._clock() >= self._deadline():
                raise Unavailable("the decode worker's lease ran out during the simulated transfer")
            self._link.write(self._page_ids[page_index], tag)
            checksums[page_index] = page_checksum(tag)
        return Sent(len(self._page_ids), tuple(checksums) if self._verify else ())

    def _breaks_at(self) -> int | None:
        """Before which page; None: it does not."""
        rng = self._transfers.rng
        return rng.randrange(len(self._page_ids)) if rng.random() < self._transfers.failing else None

    def _is_last(self, count: int) -> bool:
        return count == len(self._page_ids) - 1

    async def _spend(self, seconds: float) -> None:
        """Sleeps once there is enough to sleep for: many short pages take what they take together."""
        self._owed_seconds += seconds
        if self._owed_seconds >= SHORTEST_SLEEP_SECONDS:
            owed, self._owed_seconds = self._owed_seconds, 0.0
            await asyncio.sleep(owed)

    async def _next(self) -> tuple[int, int]:
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()
