"""Who is in: the names of running requests and the bounds on how many there are."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from common.errors import AlreadyExists, PdserveError, ResourceExhausted, Unavailable
from router.stay import Stay


class WaitingLine(Protocol):
    """What the bounds are asked for when they are met."""

    def would_displace(self, priority: int, tenant: str) -> bool:
        """Whether displace() would find one."""

    def displace(self, priority: int, tenant: str, error: PdserveError) -> bool:
        """Refuses one that waits with this error, if there is one that has less of a right to its place than a newcomer."""

    def retry_after(self) -> timedelta:
        """When a request that came now would have its turn."""


class Admission:
    """Bounded by two numbers: max_queue requests without their first token, max_in_flight requests in all.

    At the first bound a newcomer may take the place of one that waits, if that has a lower priority, or a tenant with more
    waiting: so that nobody keeps others out by having come first.
    """

    def __init__(self, *, max_queue: int, max_in_flight: int, line: WaitingLine) -> None:
        self.max_queue = max_queue
        self.max_in_flight = max_in_flight
        self._line = line
        self._inside: dict[tuple[str, str], Stay] = {}
        """By client and request id: clients choose ids without knowing of each other."""
        self._queued = 0
        self.let_in = 0
        """In all."""
        self._closed_because: str | None = None
        self._emptied = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def streaming(self) -> int:
        return len(self._inside) - self._queued

    @property
    def closed_because(self) -> str | None:
        return self._closed_because

    @property
    def is_closed(self) -> bool:
        return self._closed_because is not None

    def close(self, reason: str) -> None:
        """From now on nobody gets in."""
        self._closed_because = reason

    def check_room(self, *, priority: int, tenant: str) -> None:
        """Raises what enter() would for want of room, whatever the request's name: so that a request that is refused costs no
        more than that. Says nothing when closed: who is wrong then is told so, who is not is told by enter() (LIF-01)."""
        if self.is_closed:
            return
        self._check_bounds()
        if self._is_queue_full and not self._line.would_displace(priority, tenant):
            raise self._queue_full()

    def enter(self, request_id: str, *, client: str = "", priority: int = 0, tenant: str = "") -> Stay:
        """client: among whose requests the name must be the only one. Raises Unavailable when closed, AlreadyExists for a name in
        use, ResourceExhausted naming the full limit."""
        self._check_bounds()
        if (client, request_id) in self._inside:
            raise AlreadyExists(f"request_id {request_id!r} is in use by a running request")
        if self._is_queue_full and not self._line.displace(priority, tenant, full := self._queue_full()):
            raise full
        stay = self._inside[client, request_id] = Stay(request_id, client, on_started=self._started, on_left=self._leave)
        self._queued += 1
        self.let_in += 1
        return stay

    async def left(self, request_id: str, *, client: str = "", within_seconds: float) -> None:
        """Returns once the name is free, or so long after. A cancelled call holds its name until its task has been told, which
        may be after the client's next call has come."""
        holder = self.find(request_id, client=client)
        if holder is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_seconds):
                    await holder.left.wait()

    def find(self, request_id: str, *, client: str = "") -> Stay | None:
        return self._inside.get((client, request_id))

    def stays(self) -> list[Stay]:
        return list(self._inside.values())

    @property
    def _is_queue_full(self) -> bool:
        return self._queued >= self.max_queue

    def _check_bounds(self) -> None:
        """Those that nobody's place can be taken at."""
        if self._closed_because is not None:
            raise Unavailable(self._closed_because, reason="shutting_down")
        if self.in_flight >= self.max_in_flight:
            raise self._full(self.in_flight, self.max_in_flight, "are in flight", "--max-in-flight", "too_many_in_flight")

    def _queue_full(self) -> ResourceExhausted:
        return self._full(self._queued, self.max_queue, "wait for their first token", "--max-queue", "queue_full")

    def _full(self, count: int, limit: int, which: str, flag: str, reason: str) -> ResourceExhausted:
        wait = self._line.retry_after()
        text = f"{count} requests {which}, the limit is {limit} ({flag}); try again in {wait.total_seconds():.0f} s"
        return ResourceExhausted(text, retry_after=wait, reason=reason)

    async def empty(self) -> None:
        """Returns when nobody is inside."""
        while self._inside:
            self._emptied.clear()
            await self._emptied.wait()

    def _leave(self, stay: Stay) -> None:
        del self._inside[stay.client, stay.request_id]
        if not self._inside:
            self._emptied.set()
        if stay.is_queued:
            self._queued -= 1

    def _started(self) -> None:
        self._queued -= 1
