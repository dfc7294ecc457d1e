"""PageTable: each running request's row of token locations in the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.table_rows import TableRows


class PageTable(TableRows):
    """tensor: [rows, max_context rounded up to whole pages] int32, each element a token's location as if page_size were 1
    (page * page_size + offset). Not thread-safe: the engine thread owns it."""

    def __init__(
        self, rows: int, max_context: int, *, page_size: int, device: str | torch.device = "cpu", spare_rows: int = 0
    ) -> None:
        """spare_rows: after the others, for padding; nobody takes them."""
        super().__init__(rows, page_size=page_size)
        pages_per_row = -(-max_context // page_size)
        self.tensor = torch.zeros(rows + spare_rows, pages_per_row * page_size, dtype=torch.int32, device=device)
        self._by_page = self.tensor.view(-1, pages_per_row, page_size)
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)

    def assign(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        if pages:
            starts = torch.tensor(pages, dtype=torch.int32, device=self.tensor.device) * self.page_size
            self._by_page[row, first_page : first_page + len(pages)] = starts[:, None] + self._offsets
