"""Who is in: the names of running requests and the bounds on how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Protocol, TypeVar

from common.errors import AlreadyExists, PdserveError, ResourceExhausted, Unavailable

T = TypeVar("T")


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
        self._inside: dict[tuple[str, str], Ticket] = {}
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

    def enter(self, request_id: str, *, client: str = "", priority: int = 0, tenant: str = "") -> Ticket:
        """client: among whose requests the name must be the only one. Raises Unavailable when closed, AlreadyExists for a name in
        use, ResourceExhausted naming the full limit."""
        self._check_bounds()
        if (client, request_id) in self._inside:
            raise AlreadyExists(f"request_id {request_id!r} is in use by a running request")
        if self._is_queue_full and not self._line.displace(priority, tenant, full := self._queue_full()):
            raise full
        ticket = self._inside[client, request_id] = Ticket(self, request_id, client)
        self._queued += 1
        self.let_in += 1
        return ticket

    async def left(self, request_id: str, *, client: str = "", within_seconds: float) -> None:
        """Returns once the name is free, or so long after. A cancelled call holds its name until its task has been told, which
        may be after the client's next call has come."""
        holder = self.find(request_id, client=client)
        if holder is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_seconds):
                    await holder.left.wait()

    def find(self, request_id: str, *, client: str = "") -> Ticket | None:
        return self._inside.get((client, request_id))

    def tickets(self) -> list[Ticket]:
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

    def _leave(self, ticket: Ticket) -> None:
        del self._inside[ticket.client, ticket.request_id]
        ticket.left.set()
        if not self._inside:
            self._emptied.set()
        if ticket.is_queued:
            self._queued -= 1

    def _started(self) -> None:
        self._queued -= 1


class Ticket:
    """One request's place, and the handle by which others end it. Leaving the with block gives place and name back."""

    def __init__(self, admission: Admission, request_id: str, client: str) -> None:
        self.request_id = request_id
        self.client = client
        self.is_queued = True
        self.left = asyncio.Event()
        self._admission = admission
        self._end: Callable[[PdserveError | None], None] | None = None
        self._asked: list[PdserveError | None] = []
        self._preparing: asyncio.Timeout | None = None

    def started(self) -> None:
        """The first token is there. Idempotent."""
        if self.is_queued:
            self.is_queued = False
            self._admission._started()

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

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._admission._leave(self)
