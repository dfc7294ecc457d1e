"""A real router in the test's event loop, with fake workers around it and a client in front."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry

from common.address import Address
from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from common.work import Compatibility
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.server import Router
from tests.helpers.client import Client
from tests.helpers.eventually import eventually
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.fake_workers import FakeDecode, FakePrefill

PAGE_SIZE = 16
MAX_CONTEXT = 4096


@cache
def compatibility(model: Path, **changes: Any) -> Compatibility:
    """What a worker of this model would say of itself."""
    base = Compatibility(fingerprint(ModelDir.open(model)), "float32", PAGE_SIZE, MAX_CONTEXT, 2, 2, 16)
    return replace(base, **changes)


class RouterStand:
    """async with RouterStand(model) as stand: a router with one fake prefill and one fake decode worker, ready.

    At its end, if nothing failed, nothing may be left of any request in the router or on a worker.
    """

    def __init__(self, model: Path, *, prefill: int = 1, decode: int = 1, **config: Any) -> None:
        self.model = model
        self.prefill: list[FakePrefill] = []
        self.decode: list[FakeDecode] = []
        self.registry = CollectorRegistry()
        self.address = ""
        self.router: Router
        self.client: Client
        self._counts = prefill, decode
        options: dict[str, Any] = {"pair_wait": timedelta(milliseconds=300), "grace": timedelta(seconds=5)}
        self._config = RouterConfig(model=model, listen=Address("127.0.0.1", 0), **(options | config))

    async def __aenter__(self) -> RouterStand:
        self.router = Router(self._config, metrics=RouterMetrics(self.registry), rng=random.Random(1))
        self.address = str(await self.router.start())
        self.client = Client(self.address)
        for _ in range(self._counts[0]):
            await self.add_prefill()
        for _ in range(self._counts[1]):
            await self.add_decode()
        if all(self._counts):
            await self.ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                await self.assert_idle()
        finally:
            await self.client.channel.close(None)
            await self.router.stop()
            for worker in self.workers:
                await worker.close()

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def add_prefill(self, *, start: bool = True, **options: Any) -> FakePrefill:
        worker = FakePrefill(self.address, **self._worker_options("prefill", len(self.prefill), options))
        self.prefill.append(worker)
        if start:
            await worker.start()
        return worker

    async def add_decode(self, *, start: bool = True, **options: Any) -> FakeDecode:
        worker = FakeDecode(self.address, **self._worker_options("decode", len(self.decode), options))
        self.decode.append(worker)
        if start:
            await worker.start()
        return worker

    async def ready(self, *, within: float = 5.0) -> None:
        """Every worker that was added has its session."""
        ids = {worker.worker_id for worker in self.workers}
        await eventually(lambda: {w.id for w in self.router.registry.live if w.has_session} >= ids, within=within)

    async def assert_idle(self, *, within: float = 3.0) -> None:
        def idle() -> bool:
            assert self.router.admission.in_flight == 0, f"{self.router.admission.in_flight} requests are in flight"
            assert len(self.router.dispatch) == 0, f"{len(self.router.dispatch)} completions are still dispatched to"
            assert len(self.router.queue) == 0, f"{len(self.router.queue)} requests wait for their turn"
            loads = {worker.id: worker.ours for worker in self.router.registry.live if any(worker.ours)}
            assert not loads, f"the router thinks that it has tokens, completions, pages on {loads}"
            busy = [worker.worker_id for worker in self.workers if not worker.is_idle()]
            assert not busy, f"work is left on {busy}"
            return True

        await eventually(idle, within=within)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a name's samples with these labels, whatever the others."""
        samples = [sample for family in self.registry.collect() for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def _worker_options(self, role: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
        changes = options.pop("differs", {})
        given = {"compatibility": compatibility(self.model, **changes), "worker_id": f"{role}-{number}"}
        return given | options
