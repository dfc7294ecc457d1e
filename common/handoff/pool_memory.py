"""PoolMemory: a decode worker's KV pool as a memfd, which other processes can map and which vanishes with the last of them."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from common.handoff.base import page_range


class PoolMemory:
    """Anonymous shared memory of a fixed size: nothing is left in /dev/shm or anywhere after kill -9.

    Sealed against resizing, so that no peer can truncate it under our feet (a write beyond the end would be a SIGBUS).
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.size = num_pages * page_bytes
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.descriptor = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.view = memoryview(mmap.mmap(self.descriptor, self.size))

    def page_view(self, page: int) -> memoryview:
        """The writable bytes of one page."""
        return self.view[page_range(page, self.page_bytes)]
