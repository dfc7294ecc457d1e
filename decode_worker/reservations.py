"""Reservations: tickets in line for pages, and tickets whose pages are being filled."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from datetime import timedelta

from common.engine.handle import Emit, Reply
from common.engine.pages import PagePool
from common.errors import AlreadyExists, PdserveError
from common.work_key import WorkKey
from decode_worker.commands import Granted
from decode_worker.events import TicketClosed, TicketOpened
from decode_worker.local_prompts import LocalPrompts
from decode_worker.quarantine import Quarantine
from decode_worker.states import State
from decode_worker.ticket import Ticket


class Reservations:
    """Engine thread only. A ticket is here from ask() until take() or end(), exactly once."""

    def __init__(self, pool: PagePool, *, prompts: LocalPrompts, quarantine: Quarantine, lease: timedelta, emit: Emit) -> None:
        """prompts: who fills the local tickets."""
        self._pool = pool
        self._prompts = prompts
        self._quarantine = quarantine
        self._lease = lease
        self._emit = emit
        self._line: list[Ticket] = []
        """In the order in which they are served."""
        self._receiving: dict[str, Ticket] = {}
        self._by_key: dict[WorkKey, Ticket] = {}
        self.queued_tokens = 0
        """Of prompts in line that this worker is to compute."""

    def __len__(self) -> int:
        return len(self._line) + len(self._receiving)

    def __iter__(self) -> Iterator[Ticket]:
        return iter([*self._line, *self._receiving.values()])

    @property
    def num_by_state(self) -> tuple[int, int]:
        """RESERVED and RECEIVING."""
        return len(self._line), len(self._receiving)

    @property
    def in_line(self) -> list[Ticket]:
        return list(self._line)

    def of_key(self, key: WorkKey) -> Ticket | None:
        return self._by_key.get(key)

    def receiving(self, name: str) -> Ticket | None:
        return self._receiving.get(name)

    def ask(self, ticket: Ticket) -> None:
        """Puts a ticket in line. Raises AlreadyExists if one of its keys has a ticket."""
        for key in ticket.live_keys:
            if key in self._by_key:
                raise AlreadyExists(f"work {key} already has a ticket")
        self._by_key.update(dict.fromkeys(ticket.keys, ticket))
        bisect.insort(self._line, ticket, key=lambda waiting: waiting.precedence)
        self.queued_tokens += len(ticket.ids) if ticket.is_local else 0

    def grant(self, now: float) -> None:
        """Serves the line as far as the pages reach; nobody overtakes the first."""
        while self._line and self._try_grant(self._line[0], now):
            self._leave_line(self._line[0])

    def _try_grant(self, ticket: Ticket, now: float) -> bool:
        if ticket.is_local and not self._prompts.may_start(ticket):
            return False
        # The last token is computed here in any case, for its hidden state gives the first output's logits (HND-04).
        handle = self._pool.match(ticket.ids, max_len=len(ticket.ids) - ticket.is_local)
        pages = self._pool.try_allocate(ticket.room.total - len(handle.pages))
        if pages is None:
            self._pool.unlock(handle)
            return False
        ticket.grant(handle, pages, deadline=math.inf if ticket.is_local else now + self._lease.total_seconds())
        self._receiving[ticket.name] = ticket
        if ticket.call_id is None:
            self._prompts.start(ticket)
            return True
        page_ids = tuple(ticket.page_ids)
        if ticket.transport == "grpc":
            self._emit(TicketOpened(ticket.name, page_ids))
        self._emit(Reply(ticket.call_id, Granted(ticket.name, page_ids, handle.length, self._lease)))
        return True

    def renew(self, names: Iterable[str], *, now: float) -> list[str]:
        """Extends leases; returns the names that are not being received."""
        lost = []
        for name in names:
            if (ticket := self._receiving.get(name)) is None:
                lost.append(name)
            else:
                ticket.deadline = now + self._lease.total_seconds()
        return lost

    def expired(self, now: float) -> list[Ticket]:
        return [ticket for ticket in self._receiving.values() if ticket.deadline <= now]

    def take(self, ticket: Ticket) -> None:
        """The caller commits it: its handle and pages are the caller's from now on."""
        ticket.move_to(State.COMMITTED)
        self._forget(ticket)
        if ticket.transport == "grpc":
            self._emit(TicketClosed(ticket.name, ""))

    def end(self, ticket: Ticket, error: PdserveError, *, drained: bool = False) -> None:
        """Gives its pages back; one that a copy may still write to is quarantined. A Reserve still waiting is answered with
        error.

        drained: no write of the sender is under way or will follow. With grpc this worker itself writes, so that does not count.
        """
        state = ticket.state
        ticket.move_to(State.DONE)
        self._forget(ticket)
        if state is State.RESERVED:
            if ticket.call_id is not None:
                self._emit(Reply(ticket.call_id, error=error))
            return
        if ticket.is_local:
            self._prompts.give_back(ticket)
            return
        self._pool.unlock(ticket.handle)
        self._pool.free(ticket.spare)
        if ticket.transport == "grpc":
            self._quarantine.put(ticket.name, ticket.page_ids, sender=None)
            self._emit(TicketClosed(ticket.name, str(error)))
        elif drained:
            self._pool.free(ticket.page_ids)
        else:
            # Quarantined, not freed: a paused sender's late write would land in the next owner's page (HND-09).
            self._quarantine.put(ticket.name, ticket.page_ids, sender=ticket.pair_id)

    def _forget(self, ticket: Ticket) -> None:
        for key in ticket.keys:
            del self._by_key[key]
        if self._receiving.pop(ticket.name, None) is None:
            self._leave_line(ticket)

    def _leave_line(self, ticket: Ticket) -> None:
        self._line.remove(ticket)
        self.queued_tokens -= len(ticket.ids) if ticket.is_local else 0
