"""DecodeCore: the decode engine as a single-threaded state machine.

A request's life here (decode_worker/states.py; a ticket stands for all n completions of one prompt):

1. Reserved    A prefill worker asked for pages. In line by (-priority, uid, epoch); nobody overtakes, and nobody is served while
               a running request lacks a page. No lease yet: the caller's deadline bounds the wait, abandon() ends it.
2. Receiving   Pages granted; the sender fills them; the lease runs. Ends by Commit, or without: Release, Cancel, lease over,
               session closed, sender gone, checksum wrong. Then pages that a copy may still write to are quarantined.
3. Committed   All KV is here. Whole prompt pages are in the prefix cache, locked per completion. Waits for a place in the batch.
4. Running     One token a step. Out of pages, the youngest is retracted to its router; the oldest only skips steps.
   Leaving     It has ended, but a step in the air still has it.
5. Done        Its whole pages are prefix cache, the rest is free.

With --local-prefill always a router sends prompts here: they stand in the same line, their pages are filled by this engine's own
chunks (decode_worker/local_prompts.py), which take turns with the decode steps, and their first tokens are the Commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, assert_never

from common.engine.flights import Flights
from common.engine.handle import DEFERRED, Emit, Reply
from common.engine.pages import PagePool
from common.engine.runner import Runner
from common.errors import Leaving, Unavailable
from common.handoff.cuda_ipc import PoolExport
from common.work_key import WorkKey
from decode_worker import commands
from decode_worker.census import Census
from decode_worker.decoding import Decoding
from decode_worker.description import DecodeDescription
from decode_worker.events import HandedOver, Holding, SlotFree
from decode_worker.local_prefill import LocalPrefill, PromptLimits
from decode_worker.local_prompts import LocalPrompts
from decode_worker.tickets import NewName, Tickets, random_name

if TYPE_CHECKING:
    from common.handoff.staging import Staging


class DecodeCore:
    """An EngineCore (common/engine/handle.py): every method is called by the engine thread only."""

    def __init__(
        self,
        runner: Runner,
        *,
        pool_pages: int,
        max_running: int,
        lease: timedelta,
        emit: Emit,
        local_prefill: PromptLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_ticket: NewName = random_name,
        staging: Staging | None = None,
        cuda_pool: PoolExport | None = None,
    ) -> None:
        """local_prefill: None: Prefill is refused. staging: how pages that the event loop has received get into a pool that it
        cannot write to. cuda_pool: the runner's pool as prefill workers of this host may map it."""
        self.description = DecodeDescription(runner.compatibility, pool_pages, runner.pool.page_bytes, cuda_pool)
        self._pool = PagePool(pool_pages, runner.compatibility.page_size)
        self._emit, self._clock = emit, clock
        self._staging = staging
        self._flights = Flights(lookahead=runner.lookahead)
        self._decoding = Decoding(runner, self._pool, flights=self._flights, max_running=max_running, emit=emit)
        self._prompts = self._make_prompts(runner, local_prefill or PromptLimits(), max_running=max_running)
        self._tickets = Tickets(
            runner,
            self._pool,
            prompts=self._prompts,
            total_pages=pool_pages,
            lease=lease,
            emit=emit,
            read_page=runner.pool.read_page if staging is None else staging.read_page,
            new_name=new_ticket,
        )
        self._local = LocalPrefill(
            local_prefill, tickets=self._tickets, decoding=self._decoding, prompts=self._prompts, emit=emit
        )
        self._sessions: set[int] = set()
        self._census = Census(
            self._pool, tickets=self._tickets, prompts=self._prompts, decoding=self._decoding, flights=self._flights, emit=emit
        )
        self._draining, self._was_empty = False, True
        self._drain_call: int | None = None

    def handle(self, command: commands.Command, call_id: int | None) -> Any:
        try:
            return self._act(command, call_id)
        finally:
            self._decoding.wake()
            self._settle()

    def abandon(self, call_id: int) -> None:
        if call_id == self._drain_call:
            self._drain_call = None
        self._tickets.abandon(call_id, now=self._clock())
        self._decoding.wake()
        self._settle()

    def has_work(self) -> bool:
        can_decode = len(self._decoding) > 0 and not self._decoding.is_stuck
        return can_decode or len(self._flights) > 0 or self._prompts.has_work()

    def step(self) -> None:
        self._flights.land_due(launched=self._local.launch())
        self._settle()
        self._census.report()

    def tick(self, now: float) -> None:
        self._tickets.tick(now)
        self._decoding.wake()
        self._settle()
        self._census.report()

    def close(self) -> None:
        """The pool goes with the process: there is nobody to give anything back to."""

    def _make_prompts(self, runner: Runner, limits: PromptLimits, *, max_running: int) -> LocalPrompts:
        return LocalPrompts(
            runner,
            self._pool,
            flights=self._flights,
            chunk_tokens=limits.chunk_tokens,
            max_running=max_running,
            num_completions=lambda: len(self._decoding),
            emit=self._emit,
            on_computed=lambda ticket, tokens: self._local.run_computed(ticket, tokens),
        )

    def _act(self, command: commands.Command, call_id: int | None) -> Any:
        now = self._clock()
        match command:
            case commands.Reserve():
                return self._reserve(command, call_id)
            case commands.Prefill():
                if command.req.router_epoch in self._sessions:  # Else nobody is left to be told anything.
                    self._local.take(command, draining=self._draining)
                return None
            case commands.Renew():
                return self._tickets.renew(command.tickets, now=now)
            case commands.Commit():
                return self._commit(command, now)
            case commands.CommitAhead():
                return self._commit_ahead(command, now)
            case commands.Release():
                return self._tickets.release(command, now=now)
            case commands.Cancel():
                return self._cancel(command.key, now)
            case commands.Inquire():
                return self._emit(Holding(command.key, is_committed=self._decoding.of_key(command.key) is not None))
            case commands.StorePage():
                return self._store_page(command)
            case commands.Drained():
                return self._tickets.loop_is_done(command.ticket)
            case commands.SenderGone():
                return self._tickets.sender_is_gone(command.pair_id, now=now)
            case commands.SessionOpened():
                return self._sessions.add(command.router_epoch)
            case commands.SessionClosed():
                return self._close_session(command.router_epoch, now)
            case commands.FlushPrefixCache():
                return self._pool.flush()
            case commands.Check():
                return self._census.check()
            case commands.Drain():
                return self._drain(call_id)
            case commands.HandBack():
                return self._hand_back(now)
            case commands.Undrain():
                self._draining = False
                return None
            case _:
                assert_never(command)

    def _commit(self, command: commands.Commit, now: float) -> None:
        completions = self._tickets.commit(command, now=now)
        self._decoding.add(completions)
        if completions and command.computed_at:
            self._emit(HandedOver(now - command.computed_at))

    def _commit_ahead(self, command: commands.CommitAhead, now: float) -> None:
        if self._tickets.is_stored_by(command.pair_id, command.commit.ticket):
            self._commit(command.commit, now)

    def _reserve(self, command: commands.Reserve, call_id: int | None) -> object:
        assert call_id is not None, "a Reserve needs somebody to grant pages to"
        if self._draining:
            raise Leaving("this decode worker is draining")
        if command.req.router_epoch not in self._sessions:
            raise Unavailable(f"this decode worker has no session with router {command.req.router_epoch:016x}")
        self._tickets.reserve(command, call_id, is_running=lambda key: self._decoding.of_key(key) is not None)
        return DEFERRED

    def _store_page(self, command: commands.StorePage) -> None:
        assert self._staging is not None, "the event loop itself writes into this pool"
        self._staging.from_slot(command.slot, command.page_id)
        self._emit(SlotFree(command.slot))

    def _cancel(self, key: WorkKey, now: float) -> None:
        self._tickets.cancel(key, now=now)
        if (completion := self._decoding.of_key(key)) is not None:
            self._decoding.drop(completion)

    def _close_session(self, router_epoch: int, now: float) -> None:
        self._sessions.discard(router_epoch)
        self._tickets.close_session(router_epoch, now=now)
        self._decoding.close_session(router_epoch)

    def _drain(self, call_id: int | None) -> object:
        self._draining = True
        self._drain_call = call_id
        self._tickets.turn_away(Leaving("this decode worker is draining"))
        return DEFERRED

    def _hand_back(self, now: float) -> None:
        self._draining = True
        self._tickets.fail_all(Leaving("this decode worker is leaving"), now=now)
        for completion in self._decoding:
            self._decoding.retract(completion)

    def _settle(self) -> None:
        """After anything that may have freed pages or ended the last request."""
        if not self._decoding.is_starved:
            self._tickets.grant(self._clock())
        is_empty = self._census.is_empty
        if is_empty and not self._was_empty:
            self._census.check()
        self._was_empty = is_empty
        if self._drain_call is not None and is_empty:
            self._emit(Reply(self._drain_call))
            self._drain_call = None
