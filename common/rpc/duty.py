"""Duty: whether a worker takes work, and how it stops to: the same for both roles, whoever asks.

WORKING --drain, stay--> DRAINING --undrain--> WORKING          for an operator: DrainWorker, UndrainWorker
                         drain again: with another grace
   '------ signal, drain -----'--------------> LEAVING -> over  for good

Draining, in either state: health NOT_SERVING, load reports say so, nothing new is taken, what is here finishes or, when the grace
is over, goes back to its routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Protocol

from common.errors import Unavailable
from common.rpc.process import Stop

log = logging.getLogger(__name__)


class Drainable(Protocol):
    """The worker."""

    async def drain(self, grace: timedelta) -> None:
        """From the call on nothing new is taken. Returns when nothing is left here: what grace did not do for has been handed
        back. Cancelling it leaves the worker draining."""

    def undrain(self) -> None:
        """Takes work again."""

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        """Done when the engine has ended."""


class State(Enum):
    WORKING = auto()
    DRAINING = auto()
    LEAVING = auto()


class Duty:
    """Event loop only. One per worker process."""

    def __init__(self, worker: Drainable, *, grace: timedelta, set_serving: Callable[[bool], None]) -> None:
        """grace: unless who asks says otherwise. set_serving: of the worker's health."""
        self._worker = worker
        self._grace = grace
        self._set_serving = set_serving
        self._state = State.WORKING
        self._draining: asyncio.Task[None] | None = None
        self._leave: asyncio.Future[timedelta] = asyncio.get_running_loop().create_future()
        self.on_change: Callable[[], None] = lambda: None
        """Called when load reports have changed."""

    @property
    def state(self) -> State:
        return self._state

    def begin(self) -> None:
        """The worker is ready."""
        self._set_serving(True)

    def drain(self, grace: timedelta | None, stay: bool) -> None:
        """A router asks for it. None: the worker's own grace."""
        if not stay and not self._leave.done():
            self._leave.set_result(grace or self._grace)
        elif stay and self._state is State.WORKING and not self._leave.done():
            self._state = State.DRAINING
            log.info("a router asked this worker to drain and stay")
            self._draining = self._start(grace or self._grace)
        elif stay and self._state is State.DRAINING and grace is not None:  # Whoever asked first may have given it hours.
            self._stop_draining()
            self._draining = self._start(grace)

    def undrain(self) -> None:
        if self._state is State.DRAINING and not self._leave.done():
            self._state = State.WORKING
            log.info("a router asked this worker to take work again")
            self._stop_draining()
            self._worker.undrain()
            self._set_serving(True)
            self.on_change()

    async def over(self, stop: Stop, *, registering: asyncio.Task[None]) -> None:
        """Waits until this worker is to go, by a signal or a router's wish, and drains it; or until its engine has died. Raises
        what broke registering, if anything does."""
        stopping = asyncio.create_task(stop.requested.wait())
        broken = asyncio.create_task(_broken(registering))
        ends: list[asyncio.Future[Any]] = [self._worker.died, broken]
        try:
            reasons: list[asyncio.Future[Any]] = [stopping, self._leave, *ends]
            await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
            if not any(end.done() for end in ends):
                await self._go(ends)
            if broken.done():
                broken.result()
        finally:
            stopping.cancel()
            broken.cancel()
            self._stop_draining()

    async def _go(self, ends: list[asyncio.Future[Any]]) -> None:
        self._state = State.LEAVING
        self._stop_draining()
        self._draining = self._start(self._leave.result() if self._leave.done() else self._grace)
        await asyncio.wait([self._draining, *ends], return_when=asyncio.FIRST_COMPLETED)

    def _start(self, grace: timedelta) -> asyncio.Task[None]:
        log.info("draining for at most %g s", grace.total_seconds())
        self._set_serving(False)
        task = asyncio.create_task(self._drain(grace), name="drain")
        # What the worker says of itself from now on is news; it says so once its drain() has begun.
        asyncio.get_running_loop().call_soon(self._changed)
        return task

    async def _drain(self, grace: timedelta) -> None:
        try:
            await self._worker.drain(grace)
        except Unavailable as error:  # The engine has died, which others see to.
            log.warning("not drained: %s", error)
        else:
            log.info("drained")

    def _changed(self) -> None:
        self.on_change()

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None


async def _broken(registering: asyncio.Task[None]) -> None:
    """Raises what broke it; never returns if nothing does: without a router it ends at once, and well."""
    await asyncio.shield(registering)
    await asyncio.get_running_loop().create_future()
