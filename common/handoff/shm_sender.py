"""ShmSender: writes whole pages into a decode worker's pool through its memfd. Who may write when: common/handoff/base.py."""

from __future__ import annotations

import mmap

from common.errors import FailedPrecondition
from common.handoff.base import page_range


class ShmSender:
    """A mapping of one decode worker's pool. Copies are synchronous: when write returns, nothing of it is under way.

    One thread at a time (the engine's).
    """

    def __init__(self, descriptor: int, *, pool_bytes: int, page_bytes: int) -> None:
        """Maps pool_bytes of the descriptor, which stays the caller's. Raises FailedPrecondition if that cannot be."""
        if pool_bytes <= 0 or pool_bytes % page_bytes:
            raise FailedPrecondition(f"the decode worker's pool of {pool_bytes} bytes is not whole pages of {page_bytes} bytes")
        try:
            self._mapping = mmap.mmap(descriptor, pool_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:  # ValueError: longer than the file; a write there would be a SIGBUS.
            raise FailedPrecondition(f"cannot map the decode worker's pool of {pool_bytes} bytes: {error}") from error
        self._bytes = memoryview(self._mapping)
        self._page_bytes = page_bytes

    def write(self, page_id: int, data: memoryview) -> None:
        """Copies one whole page. Raises FailedPrecondition on a page outside the pool or data that is not one page."""
        if data.nbytes != self._page_bytes or not 0 <= page_id < len(self._bytes) // self._page_bytes:
            raise FailedPrecondition(f"page {page_id} with {data.nbytes} bytes does not fit a pool of {len(self._bytes)} bytes")
        self._bytes[page_range(page_id, self._page_bytes)] = data.cast("B")

    def close(self) -> None:
        """Unmaps: no write is possible any more."""
        self._bytes.release()
        self._mapping.close()
