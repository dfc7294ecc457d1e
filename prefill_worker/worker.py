"""PrefillWorker: the event loop's half of a prefill worker. It owns what talks to peers; the engine owns the requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from common.engine.handle import EngineDescription, EngineHandle
from common.errors import Leaving, Unavailable
from common.handoff.choose import TransportMode
from common.handoff.pool_memory import PoolMemory
from common.handoff.sim_link import SimTransfers
from common.pauses import Pauses
from common.rpc.channels import Connect, make_channel
from common.token_ids import MakeIds, tensor_ids
from common.tracing import NO_TRACING, Tracing
from common.work import PageCounts, WorkerLoad
from prefill_worker.commands import Check, FlushPrefixCache
from prefill_worker.events import Stats
from prefill_worker.journey import Tools
from prefill_worker.journeys import Journeys
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.peers import Peers
from prefill_worker.states import State
from prefill_worker.terms import Terms

MakeEngine = Callable[[Callable[[Any], None]], EngineHandle]
_log = logging.getLogger(__name__)
CLEAN_UP_SECONDS = 5.0
"""How long requests that were ended may take to give everything back."""


class PrefillWorker:
    """Event loop only. Before start() has returned, every request is answered with Unavailable."""

    def __init__(
        self,
        worker_id: str,
        *,
        make_engine: MakeEngine,
        memory: PoolMemory,
        staged: bool = False,
        transport: TransportMode,
        verify: bool,
        transfer_timeout: timedelta,
        max_requests: int,
        make_ids: MakeIds = tensor_ids,
        sim: SimTransfers | None = None,
        metrics: PrefillMetrics,
        tracing: Tracing = NO_TRACING,
        connect: Connect = make_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make_engine(on_event): an engine whose core is a PrefillCore living in memory or, if staged, reaching its
        pages through it. make_ids: what that core takes. sim: of a simulated worker. Call within the running loop."""
        self.make_ids = make_ids
        self._sim = sim
        self.worker_id = worker_id
        self.clock = clock
        self.is_draining = False
        """Set it (drain does) and nothing new is taken."""
        self._engine = make_engine(self._on_event)
        self._memory = memory
        self._staged = staged
        self._transport: TransportMode = transport
        self._verify = verify
        self._transfer_timeout = transfer_timeout
        self._max_requests = max_requests
        self.metrics = metrics
        self._tracing = tracing
        self._connect = connect
        self._pauses = Pauses(self.clock)
        self._peers: Peers | None = None
        self._journeys: Journeys | None = None
        self._stats = Stats(0, 0, 0, 0, PageCounts(0, 0, 0, 0, 0))

    async def start(self) -> EngineDescription:
        """Loads the model; raises what that raised."""
        engine: EngineDescription = await self._engine.start()
        terms = Terms(
            worker_id=self.worker_id,
            compatibility=engine.compatibility,
            page_bytes=engine.page_bytes,
            transport=self._transport,
            verify=self._verify,
            transfer_timeout=self._transfer_timeout,
            can_copy=not self._staged,
            connect=self._connect,
            sim=self._sim,
            stood_still=self._pauses.just_ended,
        )
        self._pauses.begin()
        self._peers = Peers(terms=terms, engine=self._engine, clock=self.clock)
        tools = Tools(
            engine=self._engine,
            peer_at=self._peers.at,
            page_bytes=engine.page_bytes,
            read_page=self._memory.page_view,
            slots=self._staged,
            clock=self.clock,
            verify=self._verify,
            metrics=self.metrics,
            tracing=self._tracing,
        )
        self._journeys = Journeys(tools=tools, max_requests=self._max_requests)
        return engine

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        return self._engine.died

    @property
    def journeys(self) -> Journeys:
        """Raises Unavailable while nobody can be served yet."""
        if self._journeys is None:
            raise Unavailable("the model is still being loaded")
        return self._journeys

    def load(self) -> WorkerLoad:
        stats = self._stats
        return WorkerLoad(stats.running, stats.waiting, stats.queued_tokens, stats.pages, draining=self.is_draining)

    def states(self) -> Mapping[str, int]:
        """Requests here by state. Also for the scraping thread."""
        counts = Counter(journey.state for journey in (self._journeys or ()))
        return {state.value: counts[state] for state in State if state is not State.DONE}

    async def flush_prefix_cache(self) -> int:
        """Pages dropped."""
        pages: int = await self._engine.call(FlushPrefixCache())
        return pages

    async def check(self) -> PageCounts:
        """Every page has exactly one owner, or the engine ends."""
        counts: PageCounts = await self._engine.call(Check())
        return counts

    async def drain(self, grace: timedelta) -> None:
        """Takes nothing new, lets what is here finish for so long, then hands the rest back to its routers."""
        self.is_draining = True
        if self._journeys is None:
            return
        if not await self._journeys.all_done(timeout_seconds=grace.total_seconds()):
            _log.warning("%d requests go back to their routers", len(self._journeys))
            self._journeys.end_all(Leaving(f"prefill worker {self.worker_id} is leaving"))
            await self._journeys.all_done(timeout_seconds=CLEAN_UP_SECONDS)

    def undrain(self) -> None:
        self.is_draining = False

    async def close(self) -> None:
        self._pauses.close()
        if self._peers is not None:
            await self._peers.close()
        await self._engine.close()

    def _on_event(self, event: Any) -> None:
        if isinstance(event, Stats):
            self._stats = event
            self.metrics.computed(event.computed_tokens)
        elif self._journeys is not None:
            self._journeys.on_event(event)
