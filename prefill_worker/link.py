"""Link: what stands for the mapping of a decode worker's pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from common.engine.handle import EngineHandle
from common.errors import Unavailable
from prefill_worker.commands import AwaitPoolEnd


class Link(Protocol):
    """Event loop only."""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls on_gone when the decode worker closes its side, which is how its death shows at once."""

    def close(self) -> None:
        """After the mapping is closed."""


class EngineLink:
    """The Link of a pool whose connection the engine has (cuda_ipc)."""

    def __init__(self, pair_id: str, engine: EngineHandle) -> None:
        self._pair_id = pair_id
        self._engine = engine
        self._watching: asyncio.Task[None] | None = None

    def watch(self, on_gone: Callable[[], None]) -> None:
        self._watching = asyncio.create_task(self._wait(on_gone), name=f"watch pairing {self._pair_id}")

    async def _wait(self, on_gone: Callable[[], None]) -> None:
        try:
            await self._engine.call(AwaitPoolEnd(self._pair_id))
        except Unavailable:  # The engine has ended, and all requests with it.
            return
        on_gone()

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
