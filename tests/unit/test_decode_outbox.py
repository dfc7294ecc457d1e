"""What a slow router gets, and what happens to one that does not read; sessions and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import Aborted, ResourceExhausted
from common.work import TokenOut, WorkFailure
from common.work_key import WorkKey
from decode_worker import commands, events
from decode_worker.outbox import MAX_TOKENS_PER_MESSAGE, Message, Outbox
from decode_worker.sessions import Session, Sessions

KEY = WorkKey(7, 1, 1)


def tokens(*indices: int) -> tuple[TokenOut, ...]:
    return tuple(TokenOut(KEY, index, 100 + index) for index in indices)


async def test_steps_that_pile_up_become_one_message_in_order() -> None:
    outbox = Outbox()
    outbox.put_tokens(tokens(0, 1))
    outbox.put_tokens(tokens(2))
    outbox.put(events.Retracted(KEY))
    outbox.put_tokens(tokens(3))
    assert await outbox.get() == list(tokens(0, 1, 2))
    assert await outbox.get() == events.Retracted(KEY)
    assert await outbox.get() == list(tokens(3))


async def test_a_message_that_was_taken_out_is_not_added_to() -> None:
    outbox = Outbox()
    outbox.put_tokens(tokens(0))
    message = await outbox.get()
    outbox.put_tokens(tokens(1))
    assert message == list(tokens(0))
    assert await outbox.get() == list(tokens(1))


async def test_merged_messages_have_a_size() -> None:
    outbox = Outbox()
    for _ in range(5):
        outbox.put_tokens(tokens(*range(1000)))
    first = await outbox.get()
    assert isinstance(first, list)
    assert len(first) == 4000 <= MAX_TOKENS_PER_MESSAGE
    assert await outbox.get() == list(tokens(*range(1000)))


async def test_a_full_outbox_says_the_limit_and_takes_nothing() -> None:
    outbox = Outbox(max_pending=3)
    outbox.put_tokens(tokens(0, 1))
    with pytest.raises(ResourceExhausted, match="more than 3 tokens"):
        outbox.put_tokens(tokens(2, 3))
    assert await outbox.get() == list(tokens(0, 1))
    with pytest.raises(ResourceExhausted):
        outbox.put_tokens(tokens(2, 3))  # Still being written.
    outbox.written(list(tokens(0, 1)))
    assert len(outbox) == 0
    outbox.put_tokens(tokens(2, 3))


class Stream:
    """A router's side of a session: what it cancels, what it was told; reads only while open."""

    def __init__(self) -> None:
        self.cancels: asyncio.Queue[WorkKey | None] = asyncio.Queue()
        self.ordered: list[Any] = []
        self.told: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def incoming(self) -> AsyncIterator[commands.Cancel]:
        while (key := await self.cancels.get()) is not None:
            yield commands.Cancel(key)

    async def write(self, message: Message) -> None:
        await self.reads.wait()
        self.told.append(message)

    async def run(self, session: Session) -> None:
        await session.run(self.incoming(), on_command=self.ordered.append, write=self.write)


async def test_a_session_passes_events_out_and_cancels_in_until_the_router_closes_it() -> None:
    posted: list[Any] = []
    sessions, stream = Sessions(posted.append), Stream()
    with sessions.open(7) as session:
        running = asyncio.create_task(stream.run(session))
        sessions.deliver(events.StepTokens(7, tokens(0)))
        sessions.deliver(events.StepTokens(8, tokens(5)))
        await asyncio.sleep(0)
        sessions.deliver(events.Failed(WorkFailure(KEY, 14, "gone", True)))
        stream.cancels.put_nowait(KEY)
        await asyncio.sleep(0.01)
        stream.cancels.put_nowait(None)
        await running
    assert stream.told == [list(tokens(0)), events.Failed(WorkFailure(KEY, 14, "gone", True))]
    assert stream.ordered == [commands.Cancel(KEY)]
    assert posted == [commands.SessionOpened(7), commands.SessionClosed(7)]
    assert len(sessions) == 0


async def test_cap_05_a_router_that_does_not_read_loses_its_session_and_its_work_is_dropped_at_once() -> None:
    posted: list[Any] = []
    sessions, stream = Sessions(posted.append, max_pending=10), Stream()
    stream.reads.clear()
    with sessions.open(7) as session:
        running = asyncio.create_task(stream.run(session))
        for index in range(11):
            sessions.deliver(events.StepTokens(7, tokens(index)))
        assert posted[-1] == commands.SessionClosed(7)
        with pytest.raises(ResourceExhausted, match="does not read"):
            await running
    assert posted == [commands.SessionOpened(7), commands.SessionClosed(7)]


async def test_a_newer_session_of_a_router_ends_the_older_one_first() -> None:
    posted: list[Any] = []
    sessions = Sessions(posted.append)
    with sessions.open(7) as older:
        running = asyncio.create_task(Stream().run(older))
        with sessions.open(7) as newer:
            with pytest.raises(Aborted, match="newer session"):
                await running
            sessions.deliver(events.Retracted(KEY))
            assert await newer.outbox.get() == events.Retracted(KEY)
        assert len(sessions) == 0
    opened, closed = commands.SessionOpened(7), commands.SessionClosed(7)
    assert posted == [opened, closed, opened, closed]


async def test_a_broken_stream_ends_the_session_with_its_error() -> None:
    class Broken(Stream):
        async def write(self, message: Message) -> None:
            raise ConnectionError("reset")

    posted: list[Any] = []
    sessions = Sessions(posted.append)
    with sessions.open(7) as session:
        sessions.deliver(events.Retracted(KEY))
        with pytest.raises(ConnectionError):
            await Broken().run(session)
    assert posted[-1] == commands.SessionClosed(7)
