"""What a simulated worker's pages and page table rows hold: of each page not its KV, but a tag that says of which tokens it is.

    tag    start: u32 | tokens: u32 | chain: u32 | 0: u32

The page holds tokens [start, start + tokens) of a sequence whose first start + tokens ids have this chain
(common/engine/sim/tokens.py).

So a page that was lost, swapped, handed over too late or given to two requests shows at the next step that reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from common.engine.table_rows import TableRows
from common.handoff.pool_memory import PoolMemory

_TAG: Final = struct.Struct("<IIII")
TAG_BYTES: Final = _TAG.size


class Tag(NamedTuple):
    start: int
    tokens: int
    chain: int


class SimPool:
    """A KvPages of tags, in memory that a simulated handoff maps."""

    def __init__(self, memory: PoolMemory, *, page_size: int) -> None:
        self._memory = memory
        self.num_pages = memory.num_pages
        self.page_bytes = memory.page_bytes
        self.page_size = page_size

    def page_view(self, page: int) -> memoryview:
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page must be in [0, {self.num_pages}), got {page}")
        return self._memory.page_view(page)

    def read_page(self, page: int, *, tokens: int) -> bytes:
        return bytes(self.page_view(page))

    def copy_page(self, src: int, dst: int) -> None:
        self.page_view(dst)[:] = self.page_view(src)

    def write(self, page: int, tag: Tag) -> None:
        _TAG.pack_into(self.page_view(page), 0, *tag, 0)

    def read(self, page: int) -> Tag:
        return Tag(*_TAG.unpack_from(self.page_view(page))[:3])


class SimRows(TableRows):
    """pages: by row, in the order of the tokens that they hold."""

    def __init__(self, rows: int, *, page_size: int) -> None:
        super().__init__(rows, page_size=page_size)
        self.pages: dict[int, list[int]] = {}

    def assign(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        mine = self.pages.setdefault(row, [])
        assert first_page <= len(mine), f"row {row} has {len(mine)} pages, the next given is number {first_page}"
        mine[first_page:] = pages

    def release_row(self, row: int) -> None:
        super().release_row(row)
        self.pages.pop(row, None)
