"""GrpcReceiver: the decode worker's end of HandoffService.Push. It writes frames into the pages of open tickets, and only there.

    open(ticket)    the engine granted it          close(ticket)   the engine took it (commit) or ended it
         '--- store(frame) ... store(frame) ------------'
                                                        after close() nothing is written: this is the fence

Everything runs in the event loop and store() does not await, so a frame is either before close() or refused. Where the pages
cannot be written to from here, they are gathered in slots and handed to the engine one by one (common/handoff/staging.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from common.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidRequest, NotFound, ResourceExhausted
from common.handoff.base import MAX_FRAME_BYTES, page_checksum
from common.handoff.free_slots import FreeSlots
from common.handoff.ledger import Ledger


class Frame(NamedTuple):
    """A KvFrame (handoff.proto)."""

    ticket: str
    page_index: int
    offset: int
    data: bytes
    crc32: int


class _Intake:
    """One open ticket. ended: done, with the reason, once nothing may be written any more."""

    def __init__(self, pages: Sequence[int], page_bytes: int) -> None:
        self.pages = pages
        self.ledger = Ledger(len(pages), page_bytes)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.has_stream = False
        self.slots: dict[int, int] = {}
        """By page_index: where a page that is not complete is gathered."""


class GrpcReceiver:
    """Event loop only."""

    def __init__(
        self,
        *,
        page_view: Callable[[int], memoryview],
        page_bytes: int,
        slots: FreeSlots | None = None,
        on_page: Callable[[int, int], None] = lambda slot, page_id: None,
    ) -> None:
        """page_view: the writable bytes of one of this worker's pages.

        slots: frames cannot be written into the pages themselves: each page is gathered in a slot, page_view has the slots'
        bytes, and on_page(slot, page_id) is called when a page is complete there; whoever takes it then gives back the slot."""
        self._page_view = page_view
        self._page_bytes = page_bytes
        self._slots = slots
        self._on_page = on_page
        self._intakes: dict[str, _Intake] = {}

    def open(self, ticket: str, pages: Sequence[int]) -> None:
        self._intakes[ticket] = _Intake(pages, self._page_bytes)

    def close(self, ticket: str, reason: str) -> None:
        """Nothing is written for this ticket from now on. reason: why it ended, which a stream that still sends is told; empty
        if it was committed, and then a stream that is still open ends well. An unknown ticket is fine."""
        if (intake := self._intakes.pop(ticket, None)) is not None:
            intake.ended.set_result(reason)

    def check_complete(self, ticket: str) -> None:
        """Raises FailedPrecondition while bytes of this ticket are missing. A ticket that is not open here is the engine's to
        judge."""
        intake = self._intakes.get(ticket)
        if intake is not None and not intake.ledger.is_complete:
            raise FailedPrecondition(_missing(intake.ledger))

    async def receive(self, frames: AsyncIterator[Frame]) -> int:
        """Stores one stream's frames; returns the bytes stored when all of the ticket's are.

        Raises NotFound (no such ticket), AlreadyExists (it has a stream), Aborted (the ticket ended meanwhile), InvalidRequest (a
        frame breaks a rule: it and what follows are not written), FailedPrecondition (the stream ended with bytes missing).
        """
        first = await anext(frames, None)
        if first is None:
            raise InvalidRequest("frames", "must be at least one", 0)
        if (intake := self._intakes.get(first.ticket)) is None:
            raise NotFound("no such ticket is open")
        if intake.has_stream:
            raise AlreadyExists("this ticket has had a stream already")
        intake.has_stream = True
        try:
            frame: Frame | None = first
            while frame is not None:
                await self._take_slot(intake, frame.page_index)
                self._store(intake, frame, ticket=first.ticket)
                frame = await _next(frames, intake.ended)
        finally:
            self._give_back(intake)
        if not intake.ledger.is_complete:
            raise FailedPrecondition(_missing(intake.ledger))
        return intake.ledger.received

    def _store(self, intake: _Intake, frame: Frame, *, ticket: str) -> None:
        _raise_if_ended(intake.ended)
        if frame.ticket != ticket:
            raise InvalidRequest("ticket", "must be the same on every frame of a stream", "another")
        if len(frame.data) > MAX_FRAME_BYTES:
            raise InvalidRequest("data", f"must be at most {MAX_FRAME_BYTES} bytes", len(frame.data))
        if page_checksum(frame.data) != frame.crc32:
            raise InvalidRequest("crc32", f"must be the checksum of data, {page_checksum(frame.data):08x}", f"{frame.crc32:08x}")
        intake.ledger.claim(frame.page_index, frame.offset, len(frame.data))
        page_id = intake.pages[frame.page_index]
        view = self._page_view(page_id if self._slots is None else intake.slots[frame.page_index])
        view[frame.offset : frame.offset + len(frame.data)] = frame.data
        if self._slots is not None and intake.ledger.has_page(frame.page_index):
            self._on_page(intake.slots.pop(frame.page_index), page_id)

    async def _take_slot(self, intake: _Intake, page_index: int) -> None:
        """Sees to it that this page has a slot, where it needs one; waits for one while all are in use."""
        if self._slots is None or page_index in intake.slots or not 0 <= page_index < len(intake.pages):
            return
        if intake.slots:  # It has one, and whoever has and waits may wait for another who does: so it does not wait.
            if (slot := self._slots.try_take()) is None:
                raise ResourceExhausted("no room for a page before the one under way is complete")
            intake.slots[page_index] = slot
            return
        asked = self._slots.ask()
        try:
            await asyncio.wait((asked, intake.ended), return_when=asyncio.FIRST_COMPLETED)
            _raise_if_ended(intake.ended)
        except BaseException:
            self._slots.withdraw(asked)
            raise
        intake.slots[page_index] = asked.result()

    def _give_back(self, intake: _Intake) -> None:
        """A stream has ended: what it has not completed, nobody will."""
        while self._slots is not None and intake.slots:
            self._slots.give_back(intake.slots.popitem()[1])


async def _next(frames: AsyncIterator[Frame], ended: asyncio.Future[str]) -> Frame | None:
    """The next frame; None at the stream's end or when the ticket was committed; raises Aborted at once when the ticket ended
    otherwise, however quiet the sender is."""
    coming = asyncio.ensure_future(_or_none(frames))
    try:
        await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            return coming.result()
        _raise_if_ended(ended)
        return None
    finally:
        coming.cancel()


async def _or_none(frames: AsyncIterator[Frame]) -> Frame | None:
    return await anext(frames, None)


def _raise_if_ended(ended: asyncio.Future[str]) -> None:
    if ended.done() and ended.result():
        raise Aborted(f"the ticket has ended: {ended.result()}")


def _missing(ledger: Ledger) -> str:
    return f"bytes are missing: {ledger.received} of {ledger.expected} have arrived"
