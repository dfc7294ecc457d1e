"""Ledger: which bytes of a ticket's pages have arrived. Each byte is taken once, so that full means that everything is there."""

from __future__ import annotations

import bisect

from common.errors import InvalidRequest

MAX_GAPS = 64
"""Separate stretches one page may be made of at any time; a sender of ordered frames makes one."""


class Ledger:
    """Of each page, the stretches that have arrived: sorted, apart, none touching the next.

    | stretch |      | stretch |            |
    0         '-gap--'         '--- gap ----' page_bytes
    """

    def __init__(self, page_count: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._stretches: list[list[tuple[int, int]]] = [[] for _ in range(page_count)]
        self.received = 0
        self.expected = page_count * page_bytes

    @property
    def is_complete(self) -> bool:
        return self.received == self.expected

    def has_page(self, page_index: int) -> bool:
        """All of this page's bytes have arrived."""
        return self._stretches[page_index] == [(0, self._page_bytes)]

    def claim(self, page_index: int, offset: int, length: int) -> None:
        """Notes that these bytes arrive now. Raises InvalidRequest, and notes nothing, unless they lie inside the ticket's pages
        and none of them has arrived before."""
        if not 0 <= page_index < len(self._stretches):
            raise InvalidRequest("page_index", f"must be below {len(self._stretches)}, the ticket's pages", page_index)
        if length < 1 or offset < 0 or offset + length > self._page_bytes:
            rule = f"must lie inside the page's {self._page_bytes} bytes and not be empty"
            raise InvalidRequest("offset and data", rule, (offset, length))
        stretches, end = self._stretches[page_index], offset + length
        at = bisect.bisect_left(stretches, (offset, offset))
        before = at > 0 and stretches[at - 1][1] > offset
        after = at < len(stretches) and stretches[at][0] < end
        if before or after:
            raise InvalidRequest("offset and data", f"must not overlap bytes of page {page_index} sent before", (offset, length))
        self._insert(stretches, at, offset, end)
        self.received += length

    def _insert(self, stretches: list[tuple[int, int]], at: int, start: int, end: int) -> None:
        first, last = at, at
        if at > 0 and stretches[at - 1][1] == start:
            first, start = at - 1, stretches[at - 1][0]
        if at < len(stretches) and stretches[at][0] == end:
            last, end = at + 1, stretches[at][1]
        if first == last and len(stretches) >= MAX_GAPS:
            raise InvalidRequest("offset", f"must not leave more than {MAX_GAPS} gaps in a page", start)
        stretches[first:last] = [(start, end)]
