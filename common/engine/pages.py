"""PagePool: who has each page of a worker's KV pool. Ids only; the bytes are in common/engine/kv_pool.py.

    free --try_allocate--> held --insert--> cached (held while a handle locks it) --evict, flush--> free
                            |  '--free--> free
                            '--quarantine--> quarantined --release_quarantined--> free

A page is quarantined when its owner is gone but a copy may still write to it; it is nobody's until that is ruled out.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.prefix_cache import PrefixCache, PrefixHandle
from common.work import PageCounts


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // page_size)


class PagePool:
    """Not thread-safe: the engine thread owns it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._total = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: set[int] = set()
        self._quarantined: set[int] = set()
        self._cache = PrefixCache(page_size)

    @property
    def available(self) -> int:
        """Pages try_allocate could hand out now."""
        return len(self._free) + self._cache.num_unlocked

    def match(self, ids: Sequence[int], *, max_len: int) -> PrefixHandle:
        """Locks the longest cached prefix of ids, in whole pages and at most max_len tokens; unlock it or pass it to insert."""
        return self._cache.match(ids, max_len=max_len)

    def unlock(self, handle: PrefixHandle) -> None:
        self._cache.unlock(handle)

    def try_allocate(self, count: int) -> list[int] | None:
        """count pages, now the caller's, or None if there are not that many (then nothing was evicted)."""
        if count > self.available:
            return None
        if (lacking := count - len(self._free)) > 0:
            self._free.extend(self._cache.evict(lacking))
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives the caller's pages back."""
        self._disown(pages)
        self._free.extend(pages)

    def insert(self, ids: Sequence[int], pages: Sequence[int], handle: PrefixHandle) -> PrefixHandle:
        """Caches the whole pages of ids whose KV is computed.

        pages: one per whole page of ids; the first len(handle.pages) are the handle's own, the rest the caller's, which pass to
        the cache (where it already has an equal page, the caller's is freed).
        Returns a locked handle over all of them, whose .pages hold from now on; `handle` is unlocked.
        """
        taken = pages[: len(ids) // self.page_size]
        own = taken[len(handle.pages) :]
        grown, duplicates = self._cache.insert(ids, taken)
        self._disown(own)
        self._free.extend(duplicates)
        self._cache.unlock(handle)
        return grown

    def quarantine(self, pages: Sequence[int]) -> None:
        """The caller's pages become nobody's until release_quarantined."""
        self._disown(pages)
        self._quarantined.update(pages)

    def release_quarantined(self, pages: Sequence[int]) -> None:
        assert self._quarantined.issuperset(pages), f"not quarantined: {sorted(set(pages) - self._quarantined)}"
        self._quarantined.difference_update(pages)
        self._free.extend(pages)

    def flush(self) -> int:
        """Drops every cached page nobody uses; returns how many."""
        dropped = self._cache.evict(self._cache.num_unlocked)
        self._free.extend(dropped)
        return len(dropped)

    def counts(self) -> PageCounts:
        return PageCounts(
            free=len(self._free),
            held=len(self._owned) + self._cache.num_locked,
            cached=self._cache.num_unlocked,
            quarantined=len(self._quarantined),
            total=self._total,
        )

    def check(self) -> None:
        """Raises AssertionError unless every page is in exactly one state."""
        counts = self.counts()
        assert counts.free + counts.held + counts.cached + counts.quarantined == counts.total, (
            f"pages are not conserved: {counts}"
        )
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        apart = free.isdisjoint(self._owned) and free.isdisjoint(self._quarantined) and self._owned.isdisjoint(self._quarantined)
        assert apart, "a page has two owners"
        cached = self._cache.pages()
        assert len(cached) == self._cache.num_nodes, "a page is cached twice"
        assert cached.isdisjoint(free | self._owned | self._quarantined), "a cached page has another owner"

    def check_idle(self) -> None:
        """check(), and nobody holds anything: for when no request is left."""
        self.check()
        counts = self.counts()
        assert counts.held == 0, f"pages are still held with no request left: {counts}"

    def _disown(self, pages: Sequence[int]) -> None:
        assert self._owned.issuperset(pages) and len(set(pages)) == len(pages), f"not owned: {sorted(set(pages) - self._owned)}"
        self._owned.difference_update(pages)
