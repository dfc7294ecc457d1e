"""PoolMemory: a worker's KV pool as a memfd, which other processes can map and which vanishes with the last of them."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Any

from common.descriptor import Descriptor
from common.handoff.base import page_range


class PoolMemory:
    """Anonymous shared memory of a fixed size: nothing is left in /dev/shm or anywhere after kill -9.

    Sealed against resizing, so that no peer can truncate it under our feet (a write beyond the end would be a SIGBUS).
    """

    def __init__(self, num_pages: int, page_bytes: int, *, descriptor: Descriptor | None = None) -> None:
        """descriptor: of such memory that another process made; None: makes it."""
        self.size = num_pages * page_bytes
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.descriptor = self._make() if descriptor is None else descriptor
        self.view = memoryview(mmap.mmap(self.descriptor, self.size))

    def _make(self) -> Descriptor:
        descriptor = Descriptor(os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, self.size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        """To the worker's own engine process, as the same memory."""
        return _attach, (self.num_pages, self.page_bytes, self.descriptor)

    def page_view(self, page: int) -> memoryview:
        """The writable bytes of one page."""
        return self.view[page_range(page, self.page_bytes)]


def _attach(num_pages: int, page_bytes: int, descriptor: Descriptor) -> PoolMemory:
    return PoolMemory(num_pages, page_bytes, descriptor=descriptor)
