"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def eventually(condition: Callable[[], object | Awaitable[object]], *, within: float, every: float = 0.02) -> None:
    """Returns once condition() is truthy and raises no AssertionError; after `within` seconds raises what it said last."""
    deadline = time.monotonic() + within
    while True:
        try:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return
            failure = AssertionError(f"still {value!r} after {within} s")
        except AssertionError as error:
            failure = error
        if time.monotonic() > deadline:
            raise failure
        await asyncio.sleep(every)
