"""Tickets: what may happen to a ticket between Reserve and its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from common.engine.handle import Emit
from common.engine.kv_pages import ReadPage
from common.engine.pages import PagePool
from common.engine.runner import Runner
from common.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Leaving,
    PdserveError,
    Unavailable,
)
from common.handoff.base import SENDER_WRITES
from common.work import TokenOut, WorkFailure
from common.work_key import WorkKey
from decode_worker import checks, commands
from decode_worker.completion import Completion, split
from decode_worker.endings import Endings
from decode_worker.events import Failed, Retracted
from decode_worker.local_prompts import LocalPrompts
from decode_worker.quarantine import Quarantine
from decode_worker.reservations import Reservations
from decode_worker.states import State
from decode_worker.ticket import Ticket

NewName = Callable[[], str]


def random_name() -> str:
    """Not to be guessed: who knows a ticket's name may write to its pages."""
    return secrets.token_hex(16)


class Tickets:
    """Engine thread only. now: the engine's clock, in seconds."""

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        *,
        prompts: LocalPrompts,
        total_pages: int,
        lease: timedelta,
        emit: Emit,
        read_page: ReadPage,
        new_name: NewName = random_name,
    ) -> None:
        """read_page: of this worker's pool, for checksums."""
        self._runner = runner
        self._pool = pool
        self._total_pages = total_pages
        self._emit = emit
        self._read_page = read_page
        self._new_name = new_name
        self._lease_seconds = lease.total_seconds()
        self._quarantine = Quarantine(pool)
        self.reservations = Reservations(pool, prompts=prompts, quarantine=self._quarantine, lease=lease, emit=emit)
        """Others only count them."""
        self._endings = Endings(lease)

    def __len__(self) -> int:
        return len(self.reservations)

    @property
    def num_quarantined(self) -> int:
        return self._quarantine.num_pages

    def reserve(self, command: commands.Reserve, call_id: int, *, is_running: Callable[[WorkKey], bool]) -> None:
        """Puts a Reserve in line. Raises as commands.Reserve says, but for what sessions and draining forbid."""
        ticket = self._make(command, call_id)
        if not ticket.live_keys:
            raise Aborted(f"work {command.req.key} was cancelled")
        for key in ticket.live_keys:
            if is_running(key):
                raise AlreadyExists(f"work {key} already runs")
        self.reservations.ask(ticket)

    def prefill(self, command: commands.Prefill, *, is_running: Callable[[WorkKey], bool]) -> None:
        """Puts a prompt to be computed here in line, unless it was cancelled or is here. Raises InvalidRequest, OutOfRange."""
        ticket = self._make(command, None)
        if ticket.live_keys and not any(is_running(key) or self.reservations.of_key(key) for key in ticket.live_keys):
            self.reservations.ask(ticket)

    def _make(self, command: commands.Reserve | commands.Prefill, call_id: int | None) -> Ticket:
        compatibility = self._runner.compatibility
        checks.check_reserve(
            command.req,
            pool_pages=self._total_pages,
            page_size=compatibility.page_size,
            max_context=compatibility.max_context,
            is_local=isinstance(command, commands.Prefill),
        )
        ticket = Ticket(self._new_name(), command, call_id=call_id, page_size=compatibility.page_size)
        ticket.cancelled.update(key for key in ticket.keys if self._endings.was_cancelled(key))
        return ticket

    def grant(self, now: float) -> None:
        self.reservations.grant(now)

    def renew(self, names: Iterable[str], *, now: float) -> list[str]:
        # A commit that came ahead may have overtaken this Renew: its sender is not to think that it lost the ticket.
        return [name for name in self.reservations.renew(names, now=now) if not self._endings.was_committed(name)]

    def is_stored_by(self, pair_id: str, name: str) -> bool:
        """Whether it is a ticket whose pages that pairing's sender writes, and not committed yet."""
        ticket = self.reservations.receiving(name)
        return ticket is not None and ticket.pair_id == pair_id and ticket.transport == "cuda_ipc"

    def commit(self, command: commands.Commit, *, now: float) -> list[Completion]:
        """The completions to run. Raises as commands.Commit says. Repeated for a ticket that was committed: none, no error."""
        ticket = self.reservations.receiving(command.ticket)
        if ticket is None:
            self._endings.check_committed(command.ticket)
            return []
        checks.check_commit(ticket, command)
        try:
            checks.check_bytes(ticket, command, self._read_page, page_size=self._runner.compatibility.page_size)
        except DataLoss as error:
            # Everything was sent, so the sender writes no more.
            self._end(ticket, error, now=now, drained=True)
            raise
        self._endings.committed(ticket.name, now=now)
        return self.take(ticket, command.first_tokens)

    def take(self, ticket: Ticket, first_tokens: Sequence[TokenOut]) -> list[Completion]:
        """The completions to run of a ticket that has all its KV."""
        firsts = [
            (which, token._replace(key=key))
            for which, (key, token) in enumerate(zip(ticket.keys, first_tokens, strict=True))
            if token.finish is None and key not in ticket.cancelled
        ]
        self.reservations.take(ticket)
        return split(ticket, firsts, pool=self._pool, copy_page=self._runner.pool.copy_page)

    def release(self, command: commands.Release, *, now: float) -> None:
        if (ticket := self.reservations.receiving(command.ticket)) is not None:
            self._end(ticket, Aborted("released by the prefill worker"), now=now, drained=command.drained)
        elif command.drained:
            self._quarantine.sender_is_done(command.ticket)

    def cancel(self, key: WorkKey, *, now: float) -> None:
        """Leaves a tombstone; a ticket ends with the last of its completions."""
        self._endings.cancelled(key, now=now)
        if (ticket := self.reservations.of_key(key)) is not None:
            ticket.cancelled.add(key)
            if not ticket.live_keys:
                self._end(ticket, Aborted(f"work {ticket.req.key} was cancelled"), now=now)

    def abandon(self, call_id: int, *, now: float) -> None:
        """The sender never learned of its ticket, so it writes to none of the pages."""
        for ticket in self.reservations:
            if ticket.call_id == call_id:
                self._end(ticket, Aborted("the prefill worker gave up its Reserve"), now=now, drained=True)

    def loop_is_done(self, name: str) -> None:
        """The event loop writes no more into this ticket's pages."""
        self._quarantine.loop_is_done(name)

    def sender_is_gone(self, pair_id: str, *, now: float) -> None:
        error = FailedPrecondition("the sender of this pairing is gone")
        for ticket in self.reservations:
            if ticket.pair_id == pair_id and ticket.transport in SENDER_WRITES:
                self._fail(ticket, error, now=now, drained=True)
        self._quarantine.sender_is_gone(pair_id)

    def close_session(self, router_epoch: int, *, now: float) -> None:
        """Ends every ticket of that router, and tells nobody but a Reserve in line."""
        for ticket in self.reservations:
            if ticket.req.router_epoch == router_epoch:
                self._end(ticket, Aborted("the session with its router ended"), now=now)

    def turn_away(self, error: PdserveError) -> None:
        """Ends those in line; local ones go back to their routers."""
        for ticket in self.reservations.in_line:
            if ticket.is_local:
                self._retract(ticket, error)
            else:
                self.reservations.end(ticket, error)

    def fail_all(self, error: PdserveError, *, now: float) -> None:
        """Ends every ticket; local ones go back to their routers."""
        for ticket in self.reservations:
            if ticket.is_local:
                self._retract(ticket, error)
            else:
                self._fail(ticket, error, now=now)

    def tick(self, now: float) -> None:
        """Leases and memories end on this clock, whatever else goes on (HND-07)."""
        for ticket in self.reservations.expired(now):
            self._fail(ticket, Unavailable("the lease ran out before all KV had arrived"), now=now)
        for ticket in self.reservations:
            if ticket.due <= now:
                self._tell_failed(ticket, DeadlineExceeded("the deadline passed before the first token"), retryable=False)
                self._end(ticket, Aborted("its deadline passed"), now=now)
        self._break_circles(now)
        self._endings.forget_old(now)

    def _break_circles(self, now: float) -> None:
        """A sender that never learned of a ticket (its answer was lost) gives the pages back by ending the pairing, once nothing
        of it is under way any more: not even a Reserve in line, which may be waiting for these very pages."""
        for pair_id in self._quarantine.overdue_senders(now, after_seconds=self._lease_seconds):
            for ticket in self.reservations.in_line:
                if ticket.pair_id == pair_id and ticket.transport in SENDER_WRITES:
                    self._end(ticket, FailedPrecondition("pages of this pairing are withheld: pair again"), now=now)

    def _fail(self, ticket: Ticket, error: PdserveError, *, now: float, drained: bool = False) -> None:
        """Ends a ticket and tells its router, which might wait for long to learn it from a paused or vanished sender. A
        Reserve in line gets the error itself and may try again."""
        if ticket.state is State.RECEIVING:
            told = error if isinstance(error, Leaving) else Unavailable(str(error))
            self._tell_failed(ticket, told, retryable=True)
        self._end(ticket, error, now=now, drained=drained)

    def _tell_failed(self, ticket: Ticket, error: PdserveError, *, retryable: bool) -> None:
        for key in ticket.live_keys:
            self._emit(Failed(WorkFailure.of(key, error, retryable=retryable)))

    def _retract(self, ticket: Ticket, error: PdserveError) -> None:
        """Gives a local ticket back to its router."""
        for key in ticket.live_keys:
            self._emit(Retracted(key))
        self.reservations.end(ticket, error)

    def _end(self, ticket: Ticket, error: PdserveError, *, now: float, drained: bool = False) -> None:
        if ticket.state is State.RECEIVING:
            self._endings.lost(ticket.name, str(error), now=now)
        self.reservations.end(ticket, error, drained=drained)
