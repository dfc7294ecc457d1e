"""KvPages: what the workers' loops see of a KV pool, whatever its pages are made of."""

from __future__ import annotations

from typing import Protocol


class ReadPage(Protocol):
    def __call__(self, page: int, *, tokens: int) -> bytes:
        """A copy, in host memory, of what a page of a pool holds for its first `tokens` tokens, all layers."""


class KvPages(Protocol):
    """num_pages: of the pool; page_bytes: of each, over all layers; page_size: tokens in each."""

    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def page_size(self) -> int: ...

    def page_view(self, page: int) -> memoryview:
        """The writable bytes of one page, where they are in host memory. Raises IndexError for an unknown page."""

    def read_page(self, page: int, *, tokens: int) -> bytes:
        """See ReadPage."""

    def copy_page(self, src: int, dst: int) -> None:
        """Copies all of one page, and waits for it."""
