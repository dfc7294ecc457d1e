"""DecodeWorker: the event loop's half of a decode worker. It owns what talks to peers; the engine owns the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from common.core import Req
from common.engine.handle import EngineHandle
from common.errors import DataLoss, InvalidRequest, Leaving, PdserveError, Unavailable
from common.handoff.base import TRANSPORTS
from common.handoff.free_slots import FreeSlots
from common.handoff.grpc_receiver import GrpcReceiver
from common.handoff.pool_memory import PoolMemory
from common.token_ids import MakeIds, tensor_ids
from common.tracing import NO_TRACING, Tracing
from common.work import Compatibility, PageCounts, WorkerLoad
from decode_worker import commands, events
from decode_worker.description import DecodeDescription
from decode_worker.metrics import DecodeMetrics
from decode_worker.senders import Senders
from decode_worker.sessions import RouterCommand, Sessions
from decode_worker.ticket_names import TicketNames
from decode_worker.traces import Traces

MakeEngine = Callable[[Callable[[Any], None]], EngineHandle]
LAST_WORDS_POLLS = 100
"""10 ms apart: how often it is looked whether routers have been told everything, at the end."""
NOTHING_YET = events.Stats(0, 0, PageCounts(0, 0, 0, 0, 0))
log = logging.getLogger(__name__)


class DecodeWorker:
    """Event loop only. Before start() has returned, every request is answered with Unavailable."""

    def __init__(
        self,
        worker_id: str,
        *,
        make_engine: MakeEngine,
        memory: PoolMemory,
        offer_shm: bool,
        metrics: DecodeMetrics,
        tracing: Tracing = NO_TRACING,
        staged: bool = False,
        make_ids: MakeIds = tensor_ids,
    ) -> None:
        """make_engine(on_event): an engine whose core is a DecodeCore living in memory or, if staged, reaching its pages through
        it. offer_shm: not if staged, for peers would write to slots. make_ids: what that core takes. Call within the running
        loop."""
        assert not (staged and offer_shm)
        self.make_ids = make_ids
        self.worker_id = worker_id
        self.memory = memory
        self.metrics = metrics
        self.traces = Traces(tracing)
        self.names = TicketNames()
        self._engine = make_engine(self._on_event)
        self._description: DecodeDescription | None = None
        self.sessions = Sessions(self.post)
        self._slots = FreeSlots(memory.num_pages) if staged else None
        self.receiver = GrpcReceiver(
            page_view=memory.page_view, page_bytes=memory.page_bytes, slots=self._slots, on_page=self._on_page
        )
        self.senders = Senders(memory, offer_shm=offer_shm, engine=self._engine)
        self._stats = NOTHING_YET
        self._draining = False
        metrics.watch(
            load=self.load,
            states=lambda: self._stats.states._asdict(),
            sessions=lambda: len(self.sessions),
            outbox=lambda: self.sessions.num_unsent,
        )

    async def start(self) -> DecodeDescription:
        """Loads the model; raises what that raised."""
        self.senders.start()
        engine: DecodeDescription = await self._engine.start()
        if engine.cuda_pool is not None:
            self.senders.offer(engine.cuda_pool)
        self._description = engine
        if self._stats is NOTHING_YET:
            self._stats = events.Stats(0, 0, PageCounts(engine.pool_pages, 0, 0, 0, engine.pool_pages))
        return engine

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        return self._engine.died

    @property
    def ready(self) -> DecodeWorker:
        """This worker; raises Unavailable while it can serve nobody yet."""
        if self._description is None:
            raise Unavailable("the model is still being loaded")
        return self

    def load(self) -> WorkerLoad:
        stats = self._stats
        return WorkerLoad(stats.running, stats.waiting, stats.queued_tokens, stats.pages, draining=self._draining)

    # What peers ask.

    def pair(self, prefill_worker: str, compatibility: Compatibility) -> str:
        """A pair id. Raises Incompatible naming both values."""
        self.description.compatibility.check(compatibility, our_name=self.worker_id, their_name=prefill_worker)
        return self.senders.pair(prefill_worker)

    @property
    def description(self) -> DecodeDescription:
        """Once ready."""
        assert self._description is not None
        return self._description

    async def reserve(self, req: Req, *, pair_id: str, transport: str, verify: bool) -> commands.Granted:
        """Waits for pages; see commands.Reserve. Cancelling the wait takes it back."""
        known = [name for name in TRANSPORTS if name == transport]
        if not known:
            raise InvalidRequest("transport", f"must be one of {', '.join(TRANSPORTS)}", transport)
        self.senders.check(pair_id, known[0])
        with self.traces.reserving(req):
            granted: commands.Granted = await self._engine.call(commands.Reserve(req, pair_id, known[0], verify))
            self.traces.granted(req, granted.ticket)
        self.metrics.found_cached(granted.prefix_len)
        self.names.put(granted.ticket, req)
        return granted

    async def renew(self, tickets: tuple[str, ...]) -> list[str]:
        lost: list[str] = await self._engine.call(commands.Renew(tickets))
        return lost

    async def commit(self, command: commands.Commit) -> None:
        try:
            self.receiver.check_complete(command.ticket)
            await self._engine.call(command)
        except PdserveError as error:
            self.metrics.committed(error.status.name)
            if isinstance(error, DataLoss):
                self.traces.ended(command.ticket, error.log_text)
            raise
        self.metrics.committed("OK")
        self.traces.committed(command)

    async def release(self, command: commands.Release) -> None:
        self.traces.ended(command.ticket, "given back unused")
        await self._engine.call(command)

    def post(self, command: commands.SessionOpened | commands.SessionClosed | RouterCommand) -> None:
        self.traces.asked(command)
        self._engine.post(command)

    async def flush_prefix_cache(self) -> int:
        pages: int = await self._engine.call(commands.FlushPrefixCache())
        return pages

    async def check(self) -> PageCounts:
        """Every page has exactly one owner, or the engine ends."""
        counts: PageCounts = await self._engine.call(commands.Check())
        return counts

    # Leaving.

    async def drain(self, grace: timedelta) -> None:
        """Takes nothing new, lets what has pages finish for so long, then hands the rest back to its routers."""
        self._draining = True
        try:
            async with asyncio.timeout(grace.total_seconds()):
                await self._engine.call(commands.Drain())
        except TimeoutError:
            log.warning("%d running and %d waiting requests go back to their routers", self._stats.running, self._stats.waiting)
            await self._engine.call(commands.HandBack())

    def undrain(self) -> None:
        self._draining = False
        self._engine.post(commands.Undrain())

    async def say_goodbye(self) -> None:
        """Ends every session once its router has been told everything, or does not read."""
        for _ in range(LAST_WORDS_POLLS):
            if self.sessions.are_delivered():
                break
            await asyncio.sleep(0.01)
        self.sessions.end_all(Leaving(f"decode worker {self.worker_id} has left"))

    async def close(self) -> None:
        """Waits for the engine; for its thread also while it loads the model: torch aborts a process that ends under it."""
        await self._engine.close()
        await self.senders.close()

    # What the engine says.

    def _on_event(self, event: Any) -> None:
        self.metrics.take(event, draining=self._draining)
        self.traces.told(event)
        match event:
            case events.StepTokens() | events.PrefillStarted() | events.Retracted() | events.Holding() | events.Failed():
                self.sessions.deliver(event)
            case events.TicketOpened():
                self.receiver.open(event.ticket, event.page_ids)
            case events.TicketClosed():
                self.receiver.close(event.ticket, event.reason)
                self._engine.post(commands.Drained(event.ticket))
            case events.HandedOver():
                pass
            case events.SlotFree():
                assert self._slots is not None
                self._slots.give_back(event.slot)
            case events.Stats():
                self._stats = event
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def _on_page(self, slot: int, page_id: int) -> None:
        self._engine.post(commands.StorePage(slot, page_id))
