"""CudaPageTable: a page table that kernels read; the host keeps each row's pages, and uploads what changed in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cuda.kernels import scatter_updates
from common.engine.cuda.upload import UploadRing
from common.engine.page_table import PageTable

MAX_UPDATES = 16_384
"""Pages assigned between two steps; more are uploaded in several copies."""


class CudaPageTable(PageTable):
    """A PageTable whose assign() reaches the device with flush(). Engine thread only.

    tensor: [rows + 1, max_context rounded up to whole pages] int32 on the device. The last row belongs to padding: it points at
    dummy_page throughout. pages: [rows + 1, pages per row] int32 on the host, what assign() has been told.
    """

    def __init__(self, rows: int, max_context: int, *, page_size: int, dummy_page: int, device: torch.device) -> None:
        super().__init__(rows, max_context, page_size=page_size, device=device, spare_rows=1)
        pages_per_row = self.tensor.shape[1] // page_size
        self.pages: NDArray[np.int32] = np.full((rows + 1, pages_per_row), dummy_page, dtype=np.int32)
        self.tensor.copy_(
            torch.arange(page_size, dtype=torch.int32, device=device).repeat(pages_per_row) + dummy_page * page_size
        )
        self._updates: dict[int, dict[int, int]] = {}
        """Per row, index in it to page: one upload's updates are written in no order, so only the last of each may be there."""
        self._uploads = UploadRing(1 + MAX_UPDATES * 3, dtype=torch.int32, device=device)

    @property
    def dummy_row(self) -> int:
        return self.rows

    def assign(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        """The row's pages first_page, first_page + 1, ... are these: on the host at once, on the device after flush()."""
        self.pages[row, first_page : first_page + len(pages)] = pages
        self._updates.setdefault(row, {}).update((first_page + i, page) for i, page in enumerate(pages))

    def release_row(self, row: int) -> None:
        super().release_row(row)
        self._updates.pop(row, None)

    def flush(self) -> None:
        """Uploads what was assigned since, in the order of the current stream."""
        triples = [(row, index, page) for row, pages in self._updates.items() for index, page in pages.items()]
        for start in range(0, len(triples), MAX_UPDATES):
            updates = triples[start : start + MAX_UPDATES]
            packed = np.concatenate([[len(updates)], *updates]).astype(np.int32)
            scatter_updates(self._uploads.upload(packed), self.tensor, page_size=self.page_size, count=len(updates))
        self._updates.clear()
