"""Pages that the event loop cannot address pass through slots: each whole, each slot given back, nobody waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from common.engine.kv_pool import KVPool
from common.errors import Aborted, InvalidRequest, ResourceExhausted
from common.handoff.base import page_checksum
from common.handoff.free_slots import FreeSlots
from common.handoff.grpc_receiver import Frame, GrpcReceiver
from common.handoff.pool_memory import PoolMemory
from common.handoff.staging import MIN_SLOTS, STAGING_BYTES, Staging, slots_for
from common.work_key import WorkKey
from prefill_worker.events import Page, PagesReady
from prefill_worker.slots import Slots

PAGE = 64


def make(slots: int, pages: int = 8) -> tuple[PoolMemory, KVPool, Staging]:
    pool = KVPool(pages, num_layers=1, page_size=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    assert pool.page_bytes == PAGE
    memory = PoolMemory(slots, PAGE)
    return memory, pool, Staging(memory, pool)


def test_a_page_s_bytes_go_out_and_come_in_unchanged() -> None:
    memory, pool, staging = make(3)
    pool.tensor[5].copy_(torch.arange(16.0).view(1, 2, 2, 1, 4))
    staging.to_slot(5, 2)
    assert bytes(memory.page_view(2)) == bytes(pool.page_view(5)) == staging.read_page(5, tokens=pool.page_size)
    assert staging.read_page(5, tokens=1) == pool.read_page(5, tokens=1) != staging.read_page(5, tokens=2)
    staging.from_slot(2, 0)
    assert torch.equal(pool.tensor[0], pool.tensor[5]) and not any(pool.page_view(1))


def test_there_are_as_many_slots_as_the_bytes_allow_but_some_and_no_more_than_pages() -> None:
    assert slots_for(8 << 20, pool_pages=1000) == STAGING_BYTES // (8 << 20)
    assert slots_for(1 << 30, pool_pages=1000) == MIN_SLOTS
    assert slots_for(1024, pool_pages=10) == 10


# The prefill engine's slots.

A, B = WorkKey(1, 1, 1), WorkKey(1, 2, 1)


def ready(events: list[Any]) -> list[tuple[WorkKey, int]]:
    """What was announced: by key, which of its pages."""
    return [(event.key, page.page_index) for event in events if isinstance(event, PagesReady) for page in event.pages]


def test_pages_wait_in_line_for_a_slot_and_go_in_order() -> None:
    memory, pool, staging = make(4)
    events: list[PagesReady] = []
    slots = Slots(staging, events.append)
    for page in range(3):
        pool.page_view(page)[0] = 10 + page
    slots.put(A, [Page(i, i) for i in range(3)])
    slots.put(B, [Page(0, 7)])
    assert ready(events) == [(A, 0), (B, 0)]  # One each: a share is a quarter.
    for index in (1, 2):
        last = next(event.pages[0] for event in reversed(events) if event.key == A)
        assert memory.page_view(last.page_id)[0] == 10 + last.page_index
        slots.free(A, [last.page_id])
        assert ready(events)[-1] == (A, index)
        slots.check()
    slots.forget(A)
    slots.forget(B)
    slots.check()


def test_one_request_takes_no_more_than_its_share_of_the_slots() -> None:
    _, _, staging = make(8)
    events: list[PagesReady] = []
    slots = Slots(staging, events.append)
    slots.put(A, [Page(i, i) for i in range(8)])
    slots.put(B, [Page(0, 0)])
    assert ready(events) == [(A, 0), (A, 1), (B, 0)]


def test_a_forgotten_request_leaves_slots_and_line_and_a_late_word_of_it_changes_nothing() -> None:
    _, _, staging = make(1)
    events: list[PagesReady] = []
    slots = Slots(staging, events.append)
    slots.put(A, [Page(0, 0), Page(1, 1)])
    slots.put(B, [Page(0, 2)])
    slots.forget(A)
    assert ready(events) == [(A, 0), (B, 0)]
    slots.free(A, [0])
    slots.check()
    slots.put(A, [])
    assert ready(events) == [(A, 0), (B, 0)]


# The decode worker's.


class Intake:
    """A receiver with so many slots and pages 2 and 0 for ticket "t", 1 and 3 for ticket "u"."""

    def __init__(self, slots: int) -> None:
        self.bytes = [bytearray(PAGE) for _ in range(slots)]
        self.free = FreeSlots(slots)
        self.complete: list[tuple[int, int, bytes]] = []
        self.receiver = GrpcReceiver(
            page_view=lambda slot: memoryview(self.bytes[slot]), page_bytes=PAGE, slots=self.free, on_page=self.on_page
        )
        self.receiver.open("t", (2, 0))
        self.receiver.open("u", (1, 3))

    def on_page(self, slot: int, page_id: int) -> None:
        self.complete.append((slot, page_id, bytes(self.bytes[slot])))

    def push(self, *frames: Frame) -> asyncio.Task[int]:
        return asyncio.ensure_future(self.receiver.receive(stream(frames)))


async def stream(frames: tuple[Frame, ...]) -> AsyncIterator[Frame]:
    for one in frames:
        yield one
        await asyncio.sleep(0)
    if not frames[-1].offset:
        await asyncio.sleep(3600)


def frame(page_index: int, *, half: int, ticket: str = "t") -> Frame:
    data = bytes([ord("a") + page_index]) * 32
    return Frame(ticket, page_index, half * 32, data, page_checksum(data))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_page_is_told_of_once_whole_and_keeps_its_slot_until_given_back() -> None:
    intake = Intake(2)
    frames = [frame(index, half=half) for index in (1, 0) for half in (0, 1)]
    assert await intake.push(*frames) == 2 * PAGE
    assert [(page, data) for _, page, data in intake.complete] == [(0, b"b" * PAGE), (2, b"a" * PAGE)]
    assert len(intake.free) == 0
    for slot, _, _ in intake.complete:
        intake.free.give_back(slot)
    assert len(intake.free) == 2


async def test_a_stream_waits_for_a_slot_and_its_bytes_count_only_then() -> None:
    intake = Intake(1)
    first = intake.push(frame(0, half=0), frame(0, half=1), frame(1, half=0), frame(1, half=1))
    await settled()
    assert len(intake.complete) == 1 and not first.done()
    intake.free.give_back(intake.complete[0][0])
    assert await first == 2 * PAGE and len(intake.complete) == 2


async def test_streams_get_slots_in_the_order_in_which_they_asked() -> None:
    intake = Intake(1)
    one = intake.push(frame(0, half=0), frame(0, half=1))
    await settled()
    two = intake.push(*(frame(i, half=half, ticket="u") for i in (0, 1) for half in (0, 1)))
    await settled()
    assert [page for _, page, _ in intake.complete] == [2]
    for _ in range(2):
        intake.free.give_back(0)
        await settled()
    assert [page for _, page, _ in intake.complete] == [2, 1, 3] and await two == 2 * PAGE
    assert one.done()


async def test_a_stream_with_an_incomplete_page_does_not_wait_for_a_second_slot() -> None:
    intake = Intake(1)
    with pytest.raises(ResourceExhausted):
        await intake.push(frame(0, half=0), frame(1, half=1))
    assert len(intake.free) == 1


async def test_a_ticket_that_ends_gives_back_its_slots_and_its_place_in_line() -> None:
    intake = Intake(1)
    holder = intake.push(frame(0, half=0))
    await settled()
    waiter = intake.push(frame(0, half=0, ticket="u"))
    await settled()
    intake.receiver.close("u", "cancelled")
    with pytest.raises(Aborted):
        await waiter
    intake.receiver.close("t", "cancelled")
    with pytest.raises(Aborted):
        await holder
    assert len(intake.free) == 1 and not intake.complete


async def test_a_cancelled_wait_passes_its_slot_on() -> None:
    intake = Intake(1)
    slot = intake.free.try_take()
    assert slot is not None
    waiter = intake.push(frame(0, half=0))
    await settled()
    intake.free.give_back(slot)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert len(intake.free) == 1


@pytest.mark.parametrize("index", [-1, 2])
async def test_a_page_the_ticket_does_not_have_takes_no_slot(index: int) -> None:
    intake = Intake(1)
    with pytest.raises(InvalidRequest):
        await intake.push(frame(0, half=0)._replace(page_index=index))
    assert len(intake.free) == 1
