"""Stay: one request's time in the router, from being let in until it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from common.errors import PdserveError

T = TypeVar("T")


class Stay:
    """The handle by which others end the request. Leaving the with block gives its place and name back."""

    def __init__(self, request_id: str, client: str, *, on_started: Callable[[], None], on_left: Callable[[Stay], None]) -> None:
        self.request_id = request_id
        self.client = client
        self.is_queued = True
        self.left = asyncio.Event()
        self._on_started = on_started
        self._on_left = on_left
        self._end: Callable[[PdserveError | None], None] | None = None
        self._asked: list[PdserveError | None] = []
        self._preparing: asyncio.Timeout | None = None

    def started(self) -> None:
        """The first token is there. Idempotent."""
        if self.is_queued:
            self.is_queued = False
            self._on_started()

    def attach(self, end: Callable[[PdserveError | None], None]) -> None:
        """Says how to end the request; whoever asked for it before gets it now."""
        self._end = end
        for error in self._asked:
            end(error)

    def end(self, error: PdserveError | None) -> None:
        """Ends the request: by the client's Abort (None), or with this status."""
        if self._end is not None:
            self._end(error)
            return
        self._asked.append(error)
        if self._preparing is not None and not self._preparing.expired():  # Else somebody has asked a moment ago.
            self._preparing.reschedule(asyncio.get_running_loop().time())

    async def unless_ended(self, preparing: Awaitable[T]) -> T | None:
        """What is awaited; None as soon as the request is aborted meanwhile. Raises the status it is ended with meanwhile."""
        self._preparing = asyncio.timeout(None)
        try:
            async with self._preparing:
                return await preparing
        except TimeoutError:
            if not self._preparing.expired():
                raise
        finally:
            self._preparing = None
        if (error := self._asked[0]) is not None:
            raise error
        return None

    def __enter__(self) -> Stay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.left.set()
        self._on_left(self)
