"""Sessions: the routers that are connected. The engine takes only their work, and drops it when the session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common.errors import Aborted, PdserveError
from decode_worker.commands import Cancel, Inquire, Prefill, SessionClosed, SessionOpened
from decode_worker.events import Failed, Holding, PrefillStarted, Retracted, StepTokens
from decode_worker.outbox import MAX_PENDING, Message, News, Outbox

RouterCommand = Cancel | Prefill | Inquire
"""What a router says on its stream."""

Post = Callable[[SessionOpened | SessionClosed | RouterCommand], None]


class Session:
    """One router's stream. ended: done, with the reason, when this worker ends it."""

    def __init__(self, router_epoch: int, *, max_pending: int) -> None:
        self.router_epoch = router_epoch
        self.outbox = Outbox(max_pending=max_pending)
        self.ended: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()

    def end(self, error: PdserveError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    async def run(
        self,
        said: AsyncIterator[RouterCommand],
        *,
        on_command: Callable[[RouterCommand], None],
        write: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Until the router closes its side, or raising why not: a broken stream, or what end() was told."""
        sides = [asyncio.create_task(_read(said, on_command)), asyncio.create_task(_write(self.outbox, write))]
        try:
            waited: list[asyncio.Future[Any]] = [*sides, self.ended]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self.ended.done():
                raise self.ended.result()
            for side in sides:
                if side.done():
                    side.result()
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)


class Sessions:
    """Event loop only."""

    def __init__(self, post: Post, *, max_pending: int = MAX_PENDING) -> None:
        """post: sends a command to the engine."""
        self._post = post
        self._max_pending = max_pending
        self._by_epoch: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_epoch)

    @contextmanager
    def open(self, router_epoch: int) -> Iterator[Session]:
        """A session for as long as the block runs. An earlier one of the same router ends: its stream is broken, we just were not
        told yet."""
        if (earlier := self._by_epoch.get(router_epoch)) is not None:
            self._close(earlier, Aborted("this router opened a newer session"))
        session = self._by_epoch[router_epoch] = Session(router_epoch, max_pending=self._max_pending)
        self._post(SessionOpened(router_epoch))
        try:
            yield session
        finally:
            self._close(session, Aborted("the session is over"))

    def deliver(self, event: StepTokens | News) -> None:
        """Puts an event into its router's outbox; without a session it has no addressee. A router that does not read loses its
        session (CAP-05)."""
        match event:
            case StepTokens():
                router_epoch = event.router_epoch
            case Retracted() | PrefillStarted() | Holding():
                router_epoch = event.key.router_epoch
            case Failed():
                router_epoch = event.failure.key.router_epoch
        if (session := self._by_epoch.get(router_epoch)) is None:
            return
        try:
            if isinstance(event, StepTokens):
                session.outbox.put_tokens(event.tokens)
            else:
                session.outbox.put(event)
        except PdserveError as error:
            self._close(session, error)

    def end_all(self, error: PdserveError) -> None:
        for session in list(self._by_epoch.values()):
            self._close(session, error)

    @property
    def num_unsent(self) -> int:
        """Tokens and other messages that routers have yet to be sent. Also for the scraping thread."""
        return sum(len(session.outbox) for session in list(self._by_epoch.values()))

    def are_delivered(self) -> bool:
        """Every router has been sent everything."""
        return self.num_unsent == 0

    def _close(self, session: Session, error: PdserveError) -> None:
        session.end(error)
        if self._by_epoch.get(session.router_epoch) is session:
            del self._by_epoch[session.router_epoch]
            self._post(SessionClosed(session.router_epoch))


async def _read(said: AsyncIterator[RouterCommand], on_command: Callable[[RouterCommand], None]) -> None:
    async for command in said:
        on_command(command)


async def _write(outbox: Outbox, write: Callable[[Message], Awaitable[None]]) -> None:
    while True:
        message = await outbox.get()
        await write(message)
        outbox.written(message)
