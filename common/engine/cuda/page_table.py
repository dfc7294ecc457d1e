"""CudaPageTable: a page table whose rows are read by kernels; the host keeps each row's pages and uploads what changed in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cuda.kernels import scatter_updates
from common.engine.cuda.staging import Staging

MAX_UPDATES = 16_384
"""Pages assigned between two steps; more are uploaded in several copies."""


class CudaPageTable:
    """Like PageTable (common/engine/page_table.py), but assign() reaches the device with flush(). Engine thread only.

    tensor: [rows + 1, max_context rounded up to whole pages] int32 on the device. The last row belongs to padding: it points at
    dummy_page throughout. pages: [rows + 1, pages per row] int32 on the host, what assign() has been told.
    """

    def __init__(self, rows: int, max_context: int, *, page_size: int, dummy_page: int, device: torch.device) -> None:
        pages_per_row = -(-max_context // page_size)
        self.page_size = page_size
        self.rows = rows
        self.pages: NDArray[np.int32] = np.full((rows + 1, pages_per_row), dummy_page, dtype=np.int32)
        self.tensor = torch.empty(rows + 1, pages_per_row * page_size, dtype=torch.int32, device=device)
        self.tensor.copy_(torch.arange(page_size, dtype=torch.int32, device=device).repeat(pages_per_row) + dummy_page * page_size)
        self._free = list(range(rows - 1, -1, -1))
        self._updates: list[tuple[int, int, int]] = []
        self._staging = Staging(1 + MAX_UPDATES * 3, dtype=torch.int32, device=device)

    @property
    def dummy_row(self) -> int:
        return self.rows

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
        """The row's pages first_page, first_page + 1, ... are these: on the host at once, on the device after flush()."""
        self.pages[row, first_page : first_page + len(pages)] = pages
        self._updates += [(row, first_page + i, page) for i, page in enumerate(pages)]

    def flush(self) -> None:
        """Uploads what was assigned since, in the order of the current stream."""
        for start in range(0, len(self._updates), MAX_UPDATES):
            updates = self._updates[start : start + MAX_UPDATES]
            packed = np.concatenate([[len(updates)], *updates]).astype(np.int32)
            scatter_updates(self._staging.upload(packed), self.tensor, page_size=self.page_size, count=len(updates))
        self._updates.clear()
