"""The device's page table is what the host was told last, also of a row that changed hands between two uploads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from common.engine.cuda.page_table import CudaPageTable

PAGE_SIZE = 16
ROWS = 4
DUMMY_PAGE = 999


def test_a_row_s_last_pages_count(device: torch.device) -> None:
    table = CudaPageTable(ROWS, 20 * PAGE_SIZE, page_size=PAGE_SIZE, dummy_page=DUMMY_PAGE, device=device)
    for _ in range(3):
        told = {row: torch.randperm(500)[: 1 + row * 6].tolist() for row in range(ROWS)}
        for row in (0, 1, 2, 3, 2, 1, 3):  # Computed, given back, and taken again before a decode step.
            table.assign(row, 0, torch.randperm(500)[:20].tolist())
        for row, pages in told.items():
            table.assign(row, 0, pages)
        table.flush()
        table.flush()
        by_page = table.tensor.view(ROWS + 1, -1, PAGE_SIZE).cpu()
        for row, pages in told.items():
            wanted = torch.tensor(pages).int()[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE).int()
            assert torch.equal(by_page[row, : len(pages)], wanted)
            assert table.pages[row, : len(pages)].tolist() == pages
        assert (by_page[ROWS] // PAGE_SIZE == DUMMY_PAGE).all()
