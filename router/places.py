"""Places: where one request's completions stand in line, each time one or all of them need workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.errors import PdserveError
from router.attempt import Work
from router.completion import Completion, Stage
from router.fleet.capacity import group_pages
from router.fleet.placement import Pair
from router.queueing.request_queue import RequestQueue
from router.queueing.waiter import Place, Waiter


class _Wait(NamedTuple):
    """since: time.monotonic() seconds."""

    members: tuple[Completion, ...]
    since: float


class Places:
    """The first place in line is every attempt's: whatever runs again keeps it by arrival."""

    def __init__(
        self,
        work: Work,
        queue: RequestQueue,
        *,
        on_turn: Callable[[tuple[Completion, ...], Pair], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """on_turn(members, pair): those that still wait of those that took a place together; may raise a PdserveError.
        on_error: the request cannot go on, with this status."""
        self._work = work
        self._queue = queue
        self._on_turn = on_turn
        self._on_error = on_error
        self._waiting: dict[Waiter, _Wait] = {}
        self._place: Place | None = None

    def pages(self, members: Sequence[Completion]) -> int:
        """Of a decode worker, to begin with."""
        length = len(self._work.prompt) + len(members[0].token_ids)
        return group_pages(prompt_len=length, n=len(members), page_size=self._work.page_size)

    def take(self, members: tuple[Completion, ...], *, delay: float = 0.0) -> None:
        """Calls on_turn when it is their turn, which may be at once. delay: seconds until they are in line."""
        first, work = members[0], self._work
        waiter = Waiter(
            work.ask(avoid=first.avoid),
            uid=first.uid,
            priority=work.priority,
            tenant=work.tenant,
            tokens=len(work.prompt) + len(first.token_ids),
            output_tokens=work.output_limit - len(first.token_ids),
            pages=self.pages(members),
            deadline=work.deadline,
            go=lambda pair: self._go(waiter, pair),
            refuse=lambda error: self._refused(waiter, error),
            is_begun=first.attempts > 0,
            place=self._place and self._place._replace(uid=first.uid),
        )
        self._waiting[waiter] = _Wait(members, time.monotonic())
        if delay:
            self._queue.enter_later(waiter, delay_seconds=delay)
        else:
            self._queue.enter(waiter)

    def give_up_ended(self) -> None:
        """Leaves the line where everybody who waits there has ended."""
        for waiter, wait in list(self._waiting.items()):
            if all(member.stage is Stage.ENDED for member in wait.members):
                self._leave(waiter)

    def close(self) -> None:
        """Idempotent."""
        for waiter in list(self._waiting):
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        self._ended(waiter, error="cancelled")
        self._queue.leave(waiter)

    def _go(self, waiter: Waiter, pair: Pair) -> None:
        self._place = self._place or waiter.place
        members = tuple(member for member in self._ended(waiter) if member.stage is Stage.PLACING)
        try:
            if members:
                self._on_turn(members, pair)
        except PdserveError as error:
            self._on_error(error)

    def _refused(self, waiter: Waiter, error: PdserveError) -> None:
        # What was stopped meanwhile needs no pair, and others of the request may run on well.
        if any(member.stage is not Stage.ENDED for member in self._ended(waiter, error=error.log_text)):
            self._on_error(error)

    def _ended(self, waiter: Waiter, *, error: str = "") -> tuple[Completion, ...]:
        """Its wait is over; those who waited."""
        members, since = self._waiting.pop(waiter)
        self._work.trace.queued(since=since, uid=waiter.uid, error=error)
        return members
