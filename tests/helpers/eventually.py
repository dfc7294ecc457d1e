"""Waiting for a condition instead of sleeping, measuring beside busy neighbours, and standing still."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

SLACK = 4.0
"""How many times slower than the machine that a test was written on another may be, with neighbours."""


async def eventually(
    condition: Callable[[], object | Awaitable[object]], *, within: float, every: float = 0.02, is_bound: bool = False
) -> None:
    """Returns once condition() is truthy and raises no AssertionError; after `within` seconds, with SLACK unless the time is what
    is tested (is_bound), raises what it said last."""
    within = within if is_bound else SLACK * within
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


async def once_below(seconds: float, measure: Callable[[], Awaitable[float]], *, tries: int = 8) -> None:
    """Returns once measure() gives less than seconds. Whoever else uses the machine spoils some measurements, a fault all."""
    measured: list[float] = []
    while len(measured) < tries:
        measured.append(await measure())
        if measured[-1] < seconds:
            return
    raise AssertionError(f"never below {seconds} s, but " + ", ".join(f"{value:.3f}" for value in measured))


def stand_still(seconds: float) -> None:
    """The event loop does, as a process that is stopped."""
    time.sleep(seconds)
