"""EngineFront: the event loop's half of every engine handle: the calls under way, how it began and whether it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from common.engine.core_loop import Abandon
from common.engine.handle import Reply
from common.errors import Unavailable


class EngineFront:
    """Event loop only. A kind of engine adds start(), close() and send()."""

    def __init__(self, on_event: Callable[[Any], None]) -> None:
        """on_event: runs in the event loop, in the order of emission, and must not block."""
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._started: asyncio.Future[Any] = self._loop.create_future()
        self._died: asyncio.Future[BaseException | None] = self._loop.create_future()

    def _send(self, command: Any, call_id: int | None) -> None:
        """Puts a command on its way to the core, in order."""
        raise NotImplementedError

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        return self._died

    async def call(self, command: Any) -> Any:
        if self._died.done():
            raise Unavailable("the engine has ended")
        call_id = self._next_call
        self._next_call += 1
        future = self._calls[call_id] = self._loop.create_future()
        try:
            self._send(command, call_id)
            return await future
        except asyncio.CancelledError:
            self._send(Abandon(call_id), None)
            raise
        finally:
            self._calls.pop(call_id, None)

    def post(self, command: Any) -> None:
        self._send(command, None)

    # What the engine says.

    def _announce(self, description: Any) -> None:
        if not self._started.done():
            self._started.set_result(description)

    def _deliver(self, item: Any) -> None:
        if not isinstance(item, Reply):
            self._on_event(item)
        elif (future := self._calls.get(item.call_id)) is not None and not future.done():
            if item.error is not None:
                future.set_exception(item.error)
            else:
                future.set_result(item.value)

    def _end(self, error: BaseException | None) -> None:
        if not self._started.done():
            self._started.set_exception(error or Unavailable("the engine was closed before it had started"))
        if not self._died.done():
            self._died.set_result(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Unavailable("the engine has ended"))
