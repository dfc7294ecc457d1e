"""TableRows: the rows of a page table, of which each running request has one. Which they are, not what is in them."""

from __future__ import annotations

from collections.abc import Sequence


class TableRows:
    """Not thread-safe: the engine thread owns it."""

    def __init__(self, rows: int, *, page_size: int) -> None:
        self.page_size = page_size
        self.rows = rows
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
        raise NotImplementedError
