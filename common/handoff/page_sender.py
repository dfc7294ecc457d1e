"""PageSender: what pushes one ticket's pages from the event loop, whichever way they go."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Sent(NamedTuple):
    """What Commit says about the pages. page_crc32: in page_ids order, empty unless asked for."""

    pages_sent: int
    page_crc32: tuple[int, ...]


class PageSender(Protocol):
    """put() pages as they get ready; run() sends them, in a task of its own."""

    def put(self, page_index: int, page_id: int) -> None:
        """This page of ours is complete and belongs at page_index of the ticket; it stays as it is until run() has ended."""

    async def run(self) -> Sent:
        """Until every page of the ticket was put and sent. Once it has ended, by result, error or cancellation, no page is read
        or written any more. Raises a PdserveError."""
