"""PrefillStand: a PrefillWorker over a FakeRunner in this process, with a recorder in the router's place."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from common.engine.thread import ThreadEngine
from common.handoff.pool_memory import PoolMemory
from common.handoff.staging import Staging
from common.work import TokenOut, WorkFailure
from common.work_key import WorkKey
from prefill_worker.core import PrefillCore
from prefill_worker.journey import Journey
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.order import Order
from prefill_worker.worker import PrefillWorker
from tests.helpers.eventually import eventually
from tests.helpers.fake_cuda import FakeCuda, StoringRunner, cuda_tools
from tests.helpers.fake_decode import FakeDecode, is_closed
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.prefill_core import make_req

Stands = Callable[..., Awaitable["PrefillStand"]]
"""The fixture `stands` (tests/unit/conftest.py)."""


class Recorder:
    """A Report that keeps everything, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []

    def started(self, key: WorkKey, *, cached_tokens: int) -> None:
        self.log.append(("started", (key, cached_tokens)))

    def first_token(self, token: TokenOut) -> None:
        self.log.append(("first_token", token))

    def handed_off(self, key: WorkKey) -> None:
        self.log.append(("handed_off", key))

    def failed(self, failure: WorkFailure) -> None:
        self.log.append(("failed", failure))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.log]

    def all(self, kind: str) -> list[Any]:
        return [value for name, value in self.log if name == kind]

    @property
    def failure(self) -> WorkFailure:
        (failure,) = self.all("failed")
        assert isinstance(failure, WorkFailure)
        return failure


class PrefillStand:
    """async with PrefillStand(...) as stand. At the end nothing may be under way, held or unreleased. slots: so many in front
    of a pool that the event loop cannot address, if any."""

    def __init__(
        self,
        decode: FakeDecode,
        *,
        transport: Any = "auto",
        verify: bool = False,
        transfer_timeout: float = 2.0,
        chunk_tokens: int = 8,
        max_running: int = 4,
        max_requests: int = 100,
        slots: int = 0,
        cuda: FakeCuda | None = None,
        **runner: Any,
    ) -> None:
        self.decode = decode
        self.report = Recorder()
        settings: dict[str, Any] = {"page_size": decode.page_size, "rows": max_running} | runner
        memory = PoolMemory(slots or settings.get("num_pages", 32), 2 * 4 * settings["page_size"])
        kind = FakeRunner if cuda is None else StoringRunner
        self.runner = kind(storage=None if slots else memory.view, **settings)
        self.copied: list[int] = []
        """Pages of decode workers that were copied in bulk (cuda_ipc)."""
        staging = Staging(memory, self.runner.pool) if slots else None
        tools = None if cuda is None else cuda_tools(cuda, self.runner.pool, self.copied)
        self.core: PrefillCore
        self.registry = CollectorRegistry()
        self._next_uid = 1

        def build(emit: Any) -> PrefillCore:
            self.core = PrefillCore(
                self.runner, emit=emit, max_running=max_running, chunk_tokens=chunk_tokens, staging=staging, cuda=tools
            )
            return self.core

        def make_engine(on_event: Any) -> ThreadEngine:
            self.engine = ThreadEngine(build, on_event=on_event)
            return self.engine

        self.worker = PrefillWorker(
            "prefill-test",
            make_engine=make_engine,
            memory=memory,
            staged=slots > 0,
            transport=transport,
            verify=verify,
            transfer_timeout=timedelta(seconds=transfer_timeout),
            max_requests=max_requests,
            metrics=PrefillMetrics(registry=self.registry),
        )

    async def __aenter__(self) -> PrefillStand:
        await self.worker.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.engine.died.done():
            return
        try:
            if kind is None:
                await self.assert_idle()
        finally:
            await self.worker.close()

    def submit(
        self,
        ids: Sequence[int],
        *,
        deadline: float = 20.0,
        decode_worker: str | None = None,
        report: Recorder | None = None,
        **fields: Any,
    ) -> Journey:
        """A journey that has just begun. deadline: seconds from now."""
        uid = fields.pop("uid", self._next_uid)
        req = make_req(ids, uid=uid, **fields)
        self._next_uid = max(self._next_uid, uid + req.n)
        worker = self.decode.worker_id if decode_worker is None else decode_worker
        order = Order(req, self.decode.address, worker, deadline=time.monotonic() + deadline)
        journey = self.worker.journeys.begin(order, report=report or self.report)
        assert journey is not None
        return journey

    async def finish(self, journey: Journey, *, within: float = 10.0) -> None:
        await eventually(journey.task.done, within=within)

    async def assert_idle(self) -> None:
        """Nothing is left here, and no ticket at the decode worker is still ours."""
        await eventually(lambda: len(self.worker.journeys) == 0, within=3)
        counts = await self.worker.check()
        assert (counts.held, counts.quarantined) == (0, 0), counts
        alive = {pair for pair, connection in self.decode.connections.items() if not is_closed(connection)}

        def released() -> bool:
            left = [t for t in self.decode.tickets.values() if t.state == "reserved" and t.request.pair_id in self.decode.pairs]
            # With shm, the end of the connection gives back whatever the decode worker withholds for the pairing.
            left = [t for t in left if t.request.transport == "grpc" or t.request.pair_id in alive]
            assert not left, f"tickets were not released: {left}"
            assert not any(ticket.push_open for ticket in self.decode.tickets.values()), "a push is still open"
            return True

        await eventually(released, within=4)
        assert all(ticket.drained for ticket in self.decode.tickets.values() if ticket.state == "released")
