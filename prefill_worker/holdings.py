"""Holdings: pages, prefix-cache locks and page table rows that jobs hold, and how they are given back."""

from __future__ import annotations

from common.engine.pages import PagePool, pages_for
from common.engine.table_rows import TableRows
from common.errors import OutOfRange
from prefill_worker.job import Job


class Holdings:
    """Engine thread only."""

    def __init__(self, pool: PagePool, table: TableRows, *, total_pages: int, max_context: int) -> None:
        self._pool = pool
        self._table = table
        self._total_pages = total_pages
        self._max_context = max_context

    def check_fits(self, input_len: int) -> None:
        """Raises OutOfRange if a prompt of this length could not be computed even by an idle worker (HND-01)."""
        if input_len > self._max_context:
            raise OutOfRange("prompt", f"must be at most {self._max_context} tokens on this prefill worker", input_len)
        pages = pages_for(input_len, self._pool.page_size)
        if pages > self._total_pages:
            rule = f"must fit the prefill worker's {self._total_pages} pages of {self._pool.page_size} tokens"
            raise OutOfRange("prompt", rule, f"{input_len} tokens = {pages} pages")

    def try_take(self, job: Job) -> bool:
        """Locks the job's cached prefix and gives it the pages and the row it needs, or changes nothing and says False.

        The last token is never taken from the cache: its hidden state gives the next logits (HND-04).
        """
        if self._table.num_free == 0:
            return False
        req, page_size = job.req, self._pool.page_size
        handle = self._pool.match(job.ids, max_len=job.input_len - 1)
        own = self._pool.try_allocate(pages_for(job.input_len, page_size) - len(handle.pages))
        if own is None:
            self._pool.unlock(handle)
            return False
        req.cache_handle, req.cached_len = handle, handle.length
        job.pages, job.computed_len = [*handle.pages, *own], handle.length
        req.table_idx = self._table.take_row()
        self._table.assign(req.table_idx, 0, job.pages)
        return True

    def give_back(self, job: Job) -> None:
        """Keeps the whole pages computed so far as prefix cache and frees the rest; nothing if the job holds nothing. Not while
        anything is in flight."""
        assert job.in_flight == 0, f"{job.req} is still in {job.in_flight} launched steps"
        req = job.req
        if req.table_idx < 0:
            return
        self._table.release_row(req.table_idx)
        whole = job.computed_len // self._pool.page_size
        grown = self._pool.insert(job.ids[: whole * self._pool.page_size], job.pages[:whole], req.cache_handle)
        self._pool.unlock(grown)
        self._pool.free(job.pages[whole:])
        req.table_idx, req.cache_handle, job.pages = -1, None, []

    def check(self, *, idle: bool) -> None:
        """Raises AssertionError unless every page has one owner, and nobody holds anything when idle."""
        if idle:
            self._pool.check_idle()
            assert self._table.num_free == self._table.rows, f"{self._table.rows - self._table.num_free} rows are still taken"
        else:
            self._pool.check()
