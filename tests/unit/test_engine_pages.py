"""PagePool and PrefixCache: conservation under any order of calls, hits that are the same tokens, LRU eviction."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.engine.pages import PagePool, pages_for
from common.engine.prefix_cache import PrefixHandle


def cache_prompt(pool: PagePool, ids: list[int]) -> None:
    """One request's way through the pool: match, allocate the rest, insert, unlock, free the partial page."""
    handle = pool.match(ids, max_len=len(ids) - 1)
    own = pool.try_allocate(pages_for(len(ids), pool.page_size) - len(handle.pages))
    assert own is not None
    pages = handle.pages + own
    whole = len(ids) // pool.page_size
    pool.unlock(pool.insert(ids, pages[:whole], handle))
    pool.free(pages[whole:])


@pytest.mark.parametrize(("tokens", "page_size", "pages"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)])
def test_pages_for_rounds_up(tokens: int, page_size: int, pages: int) -> None:
    assert pages_for(tokens, page_size) == pages


def test_a_match_ends_at_max_len_so_the_last_prompt_token_is_always_computed() -> None:
    pool = PagePool(8, 4)
    ids = list(range(8))
    cache_prompt(pool, ids)
    handle = pool.match(ids, max_len=len(ids) - 1)
    assert handle.length == 4
    pool.unlock(handle)
    pool.check_idle()


def test_try_allocate_evicts_only_what_it_needs_and_the_least_recently_used_first() -> None:
    pool = PagePool(4, 2)
    old, recent = [1, 2], [3, 4]
    cache_prompt(pool, old)
    cache_prompt(pool, recent)
    pages = pool.try_allocate(3)
    assert pages is not None
    for ids, length in ((old, 0), (recent, 2)):
        handle = pool.match(ids, max_len=2)
        assert handle.length == length
        pool.unlock(handle)
    pool.free(pages)
    pool.check_idle()


def test_an_allocation_that_cannot_succeed_evicts_nothing() -> None:
    pool = PagePool(4, 2)
    cache_prompt(pool, [1, 2, 3, 4])
    held = pool.try_allocate(1)
    assert held is not None
    assert pool.try_allocate(4) is None
    assert pool.counts().cached == 2
    pool.free(held)
    pool.check_idle()


def test_a_locked_prefix_is_held_and_never_evicted() -> None:
    pool = PagePool(2, 2)
    cache_prompt(pool, [1, 2, 3, 4])
    handle = pool.match([1, 2, 3, 4], max_len=4)
    assert pool.counts().held == 2
    assert pool.try_allocate(1) is None
    assert pool.flush() == 0
    pool.unlock(handle)
    assert pool.flush() == 2
    pool.check_idle()


def test_inserting_an_equal_page_twice_frees_the_second_and_names_the_first() -> None:
    pool = PagePool(4, 2)
    first, second = pool.try_allocate(1), pool.try_allocate(1)
    assert first is not None and second is not None
    handles = [pool.insert([7, 8], pages, pool.match([9, 9], max_len=2)) for pages in (first, second)]
    assert handles[0].pages == handles[1].pages == first
    assert pool.counts().free == 3
    for handle in handles:
        pool.unlock(handle)
    pool.check_idle()


def test_quarantined_pages_are_not_handed_out() -> None:
    pool = PagePool(2, 2)
    pages = pool.try_allocate(2)
    assert pages is not None
    pool.quarantine(pages)
    assert pool.try_allocate(1) is None and pool.counts().quarantined == 2
    pool.release_quarantined(pages)
    assert pool.try_allocate(2) is not None


def test_freeing_a_page_twice_is_refused() -> None:
    pool = PagePool(2, 2)
    pages = pool.try_allocate(1)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(AssertionError, match="not owned"):
        pool.free(pages)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pfx_05_a_hit_never_exceeds_the_true_common_prefix(page_size: int) -> None:
    rng = random.Random(5)
    pool = PagePool(100_000, page_size)
    seen: set[tuple[int, ...]] = set()
    for _ in range(5_000):
        ids = [rng.randrange(4) for _ in range(rng.randint(1, 24))]
        handle = pool.match(ids, max_len=len(ids))
        longest = max((n for n in range(0, len(ids) + 1, page_size) if n == 0 or tuple(ids[:n]) in seen), default=0)
        assert handle.length == longest
        pool.unlock(handle)
        cache_prompt(pool, ids)
        seen.update(tuple(ids[:n]) for n in range(1, len(ids) + 1))
    pool.check_idle()


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls conserves pages, and a page matched for some ids holds exactly those ids."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 2)
        self.owned: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.locked: list[PrefixHandle] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        possible = count <= self.pool.available
        pages = self.pool.try_allocate(count)
        assert (pages is not None) == possible
        if pages is not None:
            assert len(set(pages)) == count
            self.owned.append(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.owned:
            self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if self.owned:
            pages = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
            self.pool.quarantine(pages)
            self.quarantined.append(pages)

    @rule()
    def release_quarantined(self) -> None:
        if self.quarantined:
            self.pool.release_quarantined(self.quarantined.pop())

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def run_request(self, ids: list[int]) -> None:
        handle = self.pool.match(ids, max_len=len(ids) - 1)
        for i, page in enumerate(handle.pages):
            assert self.content[page] == tuple(ids[: (i + 1) * 2])
        own = self.pool.try_allocate(pages_for(len(ids), 2) - len(handle.pages))
        if own is None:
            self.pool.unlock(handle)
            return
        pages = handle.pages + own
        for i, page in enumerate(pages[: len(ids) // 2]):
            self.content[page] = tuple(ids[: (i + 1) * 2])
        self.locked.append(self.pool.insert(ids, pages[: len(ids) // 2], handle))
        self.owned.append(pages[len(ids) // 2 :])

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locked:
            self.pool.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))))

    @rule()
    def flush(self) -> None:
        cached = self.pool.counts().cached
        assert self.pool.flush() == cached

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        locked = {page for handle in self.locked for page in handle.pages}
        assert counts.held == sum(map(len, self.owned)) + len(locked)
        assert counts.quarantined == sum(map(len, self.quarantined))


TestPoolMachine = PoolMachine.TestCase
