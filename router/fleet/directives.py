"""Directives: what a router has to tell one registered worker. One task alone writes them: two writers on one call stall it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from common.errors import Unavailable
from common.rpc.gen.pdserve.v1 import registry_pb2

TELL_TIMEOUT: Final = timedelta(seconds=5)
Write = Callable[[registry_pb2.RouterDirective], Awaitable[None]]


class Directives:
    """Event loop only; for as long as the worker's registration stream."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[registry_pb2.RouterDirective, asyncio.Future[None]]] = asyncio.Queue()

    async def tell(self, directive: registry_pb2.RouterDirective) -> None:
        """Returns once it is on its way. Raises Unavailable if the worker does not read."""
        told = self.post(directive)
        try:
            async with asyncio.timeout(TELL_TIMEOUT.total_seconds()):
                await told
        except TimeoutError:
            raise Unavailable(f"the worker did not take the directive within {TELL_TIMEOUT.total_seconds():g} s") from None

    def post(self, directive: registry_pb2.RouterDirective) -> asyncio.Future[None]:
        """The same for who does not wait. Few are ever posted: by operators, and one at each end of the stream."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((directive, told))
        return told

    async def run(self, write: Write) -> None:
        """Writes them in order; returns after a goodbye."""
        while True:
            directive, told = await self._waiting.get()
            if told.cancelled():
                continue  # Who asked has been told that it did not come through. (What is being written then may still.)
            await write(directive)
            if not told.done():
                told.set_result(None)
            if directive.HasField("goodbye"):
                return
