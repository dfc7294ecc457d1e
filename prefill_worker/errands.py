"""Errands: work with a peer that must not be cut short because the one who asked for it lost interest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Errands:
    """Event loop only; owns the tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, errand: Coroutine[Any, Any, T], *, if_unread: Callable[[T], None] = lambda result: None) -> T:
        """Runs it in a task of its own and waits for it. If the caller is cancelled it goes on; if_unread gets the result."""
        task = asyncio.create_task(errand)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: _pass_on(done, if_unread))
            raise

    async def close(self) -> None:
        """Cancels what is under way and waits for its end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pass_on(task: asyncio.Task[T], if_unread: Callable[[T], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        if_unread(task.result())
