"""When the writers of streams write.

A write costs the router, and the client, far more than a token, and one among others far less than one alone, which wakes every
thread on its way. So tokens are gathered, and streams write in rounds:

    round      |<- gap / ROUNDS ->| round          a stream writes in a round if it has something, and
    stream A   |<- gap ------------------- ... ->| its last write is a gap ago

The gap grows with the number of streams, and further while the event loop has more to do than it can: so messages are saved,
in the router and its clients, and no token falls behind. After a moment without tokens the next round begins at once, with
all that come in the same turn of the event loop. What a call says first does not wait for a round, nor does a completion's
last token, unless text ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.demand import Demand

WRITE_SECONDS = 80e-6
"""What one write costs router and client together on the machine this was measured on (bench/router.py), with cores to spare."""
ROUNDS = 4
"""In a gap: more would gather fewer writes each, fewer would hold up those whose gap is over."""
TARGET = 0.8
"""Of the event loop's time: with more to do than that it falls behind now and then, and it cannot catch up."""
CALL_SECONDS = 350e-6
"""What a call costs at least, refused or not. It is no part of the demand that writing less often could lower: streams are not to
give way to a flood of calls."""
LONGEST_STRETCH = 4.0
LONGEST_STRETCHED_GAP = 0.25
"""Seconds: whatever else the router has to do, nobody sees a stream stand still."""
SAMPLE_SECONDS = 0.1
"""At least, and at least a gap: what a correction does shows only then."""


class Stretch:
    """By how much gaps are longer than with processors to spare: when the router cannot keep up it writes less often, and more
    at once. Each sample corrects it by how far the demand was off, as a horizontal autoscaler does its replicas: where writes are
    most of the demand one correction is enough."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, demand: float, *, gap: float) -> None:
        """demand: the share of the time in which the event loop had something to do, since the last sample. gap: seconds, without
        a stretch."""
        most = min(LONGEST_STRETCH, LONGEST_STRETCHED_GAP / gap) if gap else LONGEST_STRETCH
        self.factor = max(1.0, min(most, self.factor * demand / TARGET))


def write_gap(active_streams: int) -> float:
    """Seconds between two writes of one stream, so that all of them together never take more than one core's time."""
    return active_streams * WRITE_SECONDS


class Rounds:
    """Of all streams of a router. Event loop only."""

    def __init__(self, *, active_streams: Callable[[], int]) -> None:
        self._active_streams = active_streams
        self._waiting: set[Outlet] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._demand = Demand()
        self._calls = 0
        """Since the last sample."""
        self._sampled_at = 0.0
        self.stretch = Stretch()

    @property
    def gap(self) -> float:
        gap = write_gap(self._active_streams())
        return max(gap, min(gap * self.stretch.factor, LONGEST_STRETCHED_GAP))

    def call_came(self) -> None:
        self._calls += 1

    def add(self, outlet: Outlet, now: float) -> None:
        """It writes in the first round after its gap."""
        self._waiting.add(outlet)
        if self._timer is None:
            self._sample(now)
            self._arm(self._last + self.gap / ROUNDS - now)

    def discard(self, outlet: Outlet) -> None:
        """Idempotent."""
        self._waiting.discard(outlet)

    def _sample(self, now: float) -> None:
        seconds = now - self._sampled_at
        if seconds >= max(SAMPLE_SECONDS, self.gap):
            demand = self._demand.since_last(now) - self._calls * CALL_SECONDS / seconds
            self.stretch.observe(demand, gap=write_gap(self._active_streams()))
            self._sampled_at, self._calls = now, 0

    def _arm(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._begin)

    def _begin(self) -> None:
        now = time.monotonic()
        self._last, self._timer = now, None
        self._sample(now)
        between = max(WRITE_SECONDS, self.gap / ROUNDS)
        for outlet in [outlet for outlet in self._waiting if outlet.may_write_at <= now + between / 2]:
            outlet.touch_now()
        if self._waiting:
            self._arm(between)


class Outlet:
    """Wakes one call's writer. touch() and touch_now() are cheap, never block and may come in any number.
    may_write_at: time.monotonic() seconds; 0 before the first."""

    def __init__(self, rounds: Rounds) -> None:
        self.may_write_at = 0.0
        self._rounds = rounds
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_waiting = False
        """For a round."""
        self._is_ready = False

    def touch(self, now: float) -> None:
        """There is something to write. now: time.monotonic() seconds."""
        if self._is_ready or self._is_waiting:
            return
        if self.may_write_at:
            self._is_waiting = True
            self._rounds.add(self, now)
        else:
            self.touch_now()

    def touch_now(self) -> None:
        """There is something that must not wait."""
        self.close()
        self._is_ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when it is time to write. Then call wrote()."""
        if not self._is_ready:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._is_ready = False

    def wrote(self) -> None:
        self.may_write_at = time.monotonic() + self._rounds.gap

    def close(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._rounds.discard(self)
