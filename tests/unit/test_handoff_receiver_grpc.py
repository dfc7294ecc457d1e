"""Push, seen from the receiver: only whole, right, wanted bytes get into pages, and none after the ticket has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidRequest, NotFound, PdserveError
from common.handoff.base import MAX_FRAME_BYTES, page_checksum
from common.handoff.grpc_receiver import Frame, GrpcReceiver
from common.handoff.ledger import MAX_GAPS, Ledger

PAGE = 64


class Pool:
    """Four pages; pages 2 and 0 belong to the ticket, in this order."""

    def __init__(self) -> None:
        self.bytes = bytearray(4 * PAGE)
        self.receiver = GrpcReceiver(page_view=self.view, page_bytes=PAGE)
        self.receiver.open("ticket", (2, 0))

    def view(self, page: int) -> memoryview:
        return memoryview(self.bytes)[page * PAGE : (page + 1) * PAGE]

    async def push(self, frames: Iterable[Frame]) -> int:
        return await self.receiver.receive(_stream(frames))


async def _stream(frames: Iterable[Frame]) -> AsyncIterator[Frame]:
    for frame in frames:
        yield frame
        await asyncio.sleep(0)


def frame(page_index: int, offset: int, data: bytes, *, ticket: str = "ticket", crc32: int | None = None) -> Frame:
    return Frame(ticket, page_index, offset, data, page_checksum(data) if crc32 is None else crc32)


def whole() -> list[Frame]:
    return [frame(1, 0, b"b" * PAGE), frame(0, 32, b"c" * 32), frame(0, 0, b"a" * 32)]


async def test_frames_in_any_order_fill_the_tickets_pages() -> None:
    pool = Pool()
    with pytest.raises(FailedPrecondition, match="0 of 128"):
        pool.receiver.check_complete("ticket")
    assert await pool.push(whole()) == 2 * PAGE
    pool.receiver.check_complete("ticket")
    assert bytes(pool.bytes) == b"b" * PAGE + bytes(PAGE) + b"a" * 32 + b"c" * 32 + bytes(PAGE)


@pytest.mark.parametrize(
    "bad",
    [
        frame(2, 0, b"x"),
        frame(0, PAGE, b"x"),
        frame(0, PAGE - 1, b"xx"),
        frame(0, 1 << 62, b"x"),
        frame(0, 0, b""),
        frame(0, 0, b"x", crc32=1),
        frame(0, 0, b"x" * (MAX_FRAME_BYTES + 1)),
        frame(0, 0, b"x", ticket="other"),
        frame(1, 8, b"x" * 8),
        frame(1, 4, b"x" * 8),
        frame(1, 0, b"x" * PAGE),
    ],
    ids=[
        "foreign page", "offset at the end", "beyond the end", "huge offset", "empty", "checksum", "oversized", "other ticket",
        "replay", "overlap", "around",
    ],
)  # fmt: skip
async def test_a_hostile_frame_is_refused_and_nothing_of_it_is_written(bad: Frame) -> None:
    pool = Pool()
    with pytest.raises(InvalidRequest):
        await pool.push([frame(1, 8, b"y" * 8), bad, frame(0, 0, b"z")])
    assert bytes(pool.bytes) == bytes(8) + b"y" * 8 + bytes(4 * PAGE - 16)


async def test_a_ticket_nobody_was_granted_is_not_found() -> None:
    pool = Pool()
    with pytest.raises(NotFound):
        await pool.push([frame(0, 0, b"x", ticket="guess")])
    assert bytes(pool.bytes) == bytes(4 * PAGE)


async def test_a_stream_without_frames_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="frames must be at least one"):
        await Pool().push([])


async def test_a_ticket_has_one_stream() -> None:
    pool = Pool()
    with pytest.raises(FailedPrecondition, match="1 of 128"):
        await pool.push([frame(0, 0, b"x")])
    with pytest.raises(AlreadyExists):
        await pool.push([frame(0, 1, b"x")])


async def test_nothing_is_written_once_the_ticket_has_ended_and_the_sender_is_told_at_once() -> None:
    pool = Pool()
    sent: asyncio.Queue[Frame] = asyncio.Queue()

    async def endless() -> AsyncIterator[Frame]:
        while True:
            yield await sent.get()

    sent.put_nowait(frame(0, 0, b"x"))
    pushing = asyncio.create_task(pool.receiver.receive(endless()))
    await asyncio.sleep(0.01)
    pool.receiver.close("ticket", "the lease ran out")
    sent.put_nowait(frame(0, 1, b"y"))
    with pytest.raises(Aborted, match="the lease ran out"):
        await asyncio.wait_for(pushing, 1)
    with pytest.raises(NotFound):
        await pool.push([frame(0, 1, b"y")])
    assert pool.bytes[2 * PAGE : 2 * PAGE + 2] == b"x\0"


async def test_a_stream_that_is_still_open_when_its_ticket_is_committed_ends_well() -> None:
    pool = Pool()
    hold = asyncio.Event()

    async def slow_to_close() -> AsyncIterator[Frame]:
        for one in whole():
            yield one
        await hold.wait()

    pushing = asyncio.create_task(pool.receiver.receive(slow_to_close()))
    await asyncio.sleep(0.01)
    pool.receiver.close("ticket", "")
    assert await asyncio.wait_for(pushing, 1) == 2 * PAGE


async def test_a_tickets_first_stream_may_come_after_a_cancelled_one_of_another() -> None:
    pool = Pool()
    pool.receiver.open("second", (1,))
    pushing = asyncio.create_task(pool.receiver.receive(_forever()))
    await asyncio.sleep(0)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert await pool.push([frame(0, 0, b"s" * PAGE, ticket="second")]) == PAGE


async def _forever() -> AsyncIterator[Frame]:
    await asyncio.Event().wait()
    yield frame(0, 0, b"x")


def test_closing_an_unknown_ticket_is_fine_and_completeness_of_one_is_not_ours_to_judge() -> None:
    receiver = GrpcReceiver(page_view=lambda page: memoryview(b""), page_bytes=PAGE)
    receiver.close("unknown", "whatever")
    receiver.check_complete("unknown")


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-2, 12), st.integers(-1, 12)), max_size=40))
def test_the_ledger_takes_exactly_the_bytes_that_are_new_and_inside(claims: list[tuple[int, int, int]]) -> None:
    ledger, taken = Ledger(2, 10), set[tuple[int, int]]()
    for page, offset, length in claims:
        wanted = {(page, offset + i) for i in range(length)}
        good = length > 0 and all(0 <= p < 2 and 0 <= byte < 10 for p, byte in wanted) and not wanted & taken
        try:
            ledger.claim(page, offset, length)
            assert good
            taken |= wanted
        except PdserveError:
            assert not good
        assert ledger.received == len(taken)
    assert ledger.is_complete == (len(taken) == 20)


def test_a_page_cannot_be_shredded() -> None:
    ledger = Ledger(1, 10_000)
    for i in range(MAX_GAPS):
        ledger.claim(0, 3 * i, 1)
    with pytest.raises(InvalidRequest, match="gaps"):
        ledger.claim(0, 3 * MAX_GAPS, 1)
    ledger.claim(0, 1, 2)
    ledger.claim(0, 3 * MAX_GAPS, 1)
    assert ledger.received == MAX_GAPS + 3


def test_a_ticket_without_pages_is_complete_from_the_start() -> None:
    assert Ledger(0, PAGE).is_complete
