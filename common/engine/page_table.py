"""PageTable: each running request's row of token locations in the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PageTable:
    """tensor: [rows, max_context rounded up to whole pages] int32, each element a token's location as if page_size were 1
    (page * page_size + offset). Not thread-safe: the engine thread owns it."""

    def __init__(
        self, rows: int, max_context: int, *, page_size: int, device: str | torch.device = "cpu", spare_rows: int = 0
    ) -> None:
        """spare_rows: after the others, for padding; nobody takes them."""
        pages_per_row = -(-max_context // page_size)
        self.page_size = page_size
        self.rows = rows
        self.tensor = torch.zeros(rows + spare_rows, pages_per_row * page_size, dtype=torch.int32, device=device)
        self._by_page = self.tensor.view(-1, pages_per_row, page_size)
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_take_row(self) -> int | None:
        """A row, now the caller's, or None if all are in use. Its contents are left over."""
        return self._free.pop() if self._free else None

    def take_row(self) -> int:
        """A row; raises AssertionError if all are in use."""
        row = self.try_take_row()
        assert row is not None, f"all {self.rows} page table rows are in use"
        return row

    def release_row(self, row: int) -> None:
        assert row not in self._free, f"row {row} was released twice"
        self._free.append(row)

    def assign(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        """The row's pages first_page, first_page + 1, ... are these."""
        if pages:
            starts = torch.tensor(pages, dtype=torch.int32, device=self.tensor.device) * self.page_size
            self._by_page[row, first_page : first_page + len(pages)] = starts[:, None] + self._offsets
