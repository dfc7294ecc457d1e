"""A simulated transfer: it takes its time, keeps to the lease, and breaks when it is told to."""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import cast

import pytest

from common.errors import Unavailable
from common.handoff.page_sender import Sent
from common.handoff.sim_link import SimLink, SimSender, SimTransfers

PAGES = 8


class Link:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}

    def write(self, page_id: int, tag: memoryview) -> None:
        self.written[page_id] = bytes(tag)


def tag(page: int) -> memoryview:
    return memoryview(bytes([page]) * 16)


def make(link: Link, transfers: SimTransfers, *, deadline: float = float("inf"), verify: bool = False) -> SimSender:
    page_ids = tuple(range(100, 100 + PAGES))
    sender = SimSender(cast(SimLink, link), transfers, page_ids=page_ids, read_page=tag, deadline=lambda: deadline, verify=verify)
    for index in reversed(range(PAGES)):
        sender.put(index, index)
    return sender


def transfers(*, base: float = 0.0, page: float = 0.0, failing: float = 0.0) -> SimTransfers:
    made = SimTransfers(base_seconds=lambda: base, page_seconds=lambda: page, seed=1)
    made.failing = failing
    return made


async def test_every_tag_lands_where_it_belongs_and_is_checked_if_asked_for() -> None:
    link = Link()
    assert await make(link, transfers(), verify=True).run() == Sent(PAGES, tuple(zlib.crc32(tag(page)) for page in range(PAGES)))
    assert link.written == {100 + page: bytes(tag(page)) for page in range(PAGES)}
    assert await make(Link(), transfers()).run() == Sent(PAGES, ())


@pytest.mark.parametrize(("base", "page"), [(0.06, 0.0), (0.0, 0.0075), (0.0, 0.0002)])
async def test_it_takes_its_time_also_when_each_page_takes_less_than_a_timer_can_tell(base: float, page: float) -> None:
    start = time.monotonic()
    await make(Link(), transfers(base=base, page=page)).run()
    assert time.monotonic() - start >= 0.9 * (base + PAGES * page) - 0.0005


async def test_nothing_is_written_once_the_lease_is_over() -> None:
    link = Link()
    with pytest.raises(Unavailable, match="the decode worker's lease ran out during the simulated transfer"):
        await make(link, transfers(page=0.02), deadline=time.monotonic() + 0.05).run()
    assert 0 < len(link.written) < PAGES


async def test_a_transfer_that_is_to_break_breaks_before_its_last_page_has_landed() -> None:
    for _ in range(20):
        link = Link()
        with pytest.raises(Unavailable, match="fault injection"):
            await make(link, transfers(failing=1.0)).run()
        assert len(link.written) < PAGES
    some = transfers(failing=0.5)
    ends = await asyncio.gather(*(make(Link(), some).run() for _ in range(100)), return_exceptions=True)
    assert 30 < sum(isinstance(end, Unavailable) for end in ends) < 70


async def test_it_writes_nothing_after_it_was_cancelled() -> None:
    link = Link()
    running = asyncio.create_task(make(link, transfers(page=0.01)).run())
    await asyncio.sleep(0.025)
    running.cancel()
    await asyncio.wait((running,))
    written = len(link.written)
    await asyncio.sleep(0.05)
    assert written == len(link.written) < PAGES
