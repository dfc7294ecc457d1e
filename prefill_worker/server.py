"""The prefill worker process: its parts put together, and its staged end.

Start: announced to the routers -> server listening (health: NOT_SERVING) -> model loaded by the engine -> SERVING, registered.
End:   health NOT_SERVING, load says draining -> requests get `grace` -> the rest go back to their routers -> goodbye -> exit 0.
       An engine that dies ends the process at once with exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

from common.address import Address
from common.config import describe
from common.engine.engines import make_engine
from common.engine.handle import EngineDescription, EngineHandle
from common.engine.sim.start import Simulation
from common.engine.start import make_memory
from common.errors import Leaving, Unavailable
from common.handoff.cuda_driver import is_cuda_fault
from common.handoff.pool_memory import PoolMemory
from common.log_output import tell
from common.metrics import REGISTRY, start_metrics_server
from common.rpc.announcement import Announcement
from common.rpc.duty import Duty
from common.rpc.gen.pdserve.v1 import prefill_pb2_grpc
from common.rpc.health import Health
from common.rpc.process import Stop
from common.rpc.registration import Registration
from common.rpc.security import Security
from common.rpc.server import ROUTER_SILENCE
from common.token_ids import plain_ids, tensor_ids
from common.tracing import LAST_SPANS_SECONDS, start_tracing
from common.version import VERSION
from common.work import WorkerProfile
from prefill_worker.config import Config
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.servicer import PrefillServicer
from prefill_worker.simulation import make_sim_engine
from prefill_worker.worker import PrefillWorker

SERVICE: Final = "pdserve.v1.PrefillService"
LAST_WORDS_SECONDS: Final = 1.0
"""For what is still to be sent to routers at the end."""

_OBITUARY: Final = (
    "the engine has died: its CUDA context is lost, and all its requests start anew on other workers"
    " (it may have stored into the GPU memory of a decode worker that has just ended)"
)

log = logging.getLogger(__name__)


class PrefillServer:
    """Everything in one prefill worker process."""

    def __init__(
        self,
        config: Config,
        *,
        memory: PoolMemory,
        security: Security | None = None,
        simulation: Simulation | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """security, simulation, registry: for a worker that shares its process with others; the first two default to its own."""
        self._config = config
        self._memory = memory
        self._security = security or Security(config)
        self._address: Address
        self._registration: Registration | None = None
        self._registering: asyncio.Task[None] | None = None
        self._simulation = simulation or (Simulation(config) if config.is_simulated else None)
        worker_id = f"prefill-{secrets.token_hex(4)}"
        self._tracing = start_tracing(config.otlp_endpoint, role="prefill", instance=worker_id)
        self.worker = PrefillWorker(
            worker_id,
            make_engine=self._make_engine,
            memory=memory,
            staged=config.on_cuda,
            transport=config.transport,
            verify=config.verify_handoff,
            transfer_timeout=config.transfer_timeout,
            max_requests=config.max_requests,
            make_ids=plain_ids if config.is_simulated else tensor_ids,
            sim=None if self._simulation is None else self._simulation.transfers,
            metrics=PrefillMetrics(registry=registry),
            tracing=self._tracing,
            connect=partial(self._security.connect, silence=config.peer_silence),
        )
        self._server = self._security.make_server(silence=ROUTER_SILENCE)
        self._health = Health(self._server, (SERVICE,), others=self._security.services)
        self._duty = Duty(self.worker, grace=config.grace, set_serving=partial(self._health.set, SERVICE))
        self._servicer = PrefillServicer(self.worker, longest=config.request_timeout)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._servicer, self._server)
        self.worker.metrics.watch(
            load=self.worker.load,
            states=self.worker.states,
            sessions=lambda: len(self._servicer.sessions),
            outbox=lambda: sum(session.num_unsent for session in self._servicer.sessions),
        )

    async def listen(self) -> Address:
        """Raises StartError. From now on health answers; the service does once load() has returned."""
        self._address = await self._security.bind(self._server, self._config.listen)
        await self._server.start()
        return self._address

    async def load(self, *, announcement: Announcement | None = None) -> None:
        """Loads the model and joins the routers. announcement: ended once they know the worker itself. Raises StartError."""
        engine = await self.worker.start()
        self._duty.begin()
        self._registration = Registration(
            routers=self._config.router,
            profile=self._profile(engine),
            load=self.worker.load,
            on_drain=self._duty.drain,
            on_undrain=self._duty.undrain,
            connect=self._security.connect,
        )
        self._duty.on_change = self._registration.changed
        self._registering = asyncio.create_task(self._registration.run(), name="registration")
        if announcement is not None:
            announcement.ends_after(self._registration.answered())

    async def ended(self, stop: Stop) -> int:
        """Waits for a reason to end, ends, and returns the exit code."""
        if self._registering is not None:
            await self._duty.over(stop, registering=self._registering)
        return await self.close()

    async def close(self) -> int:
        """Ends the sessions and closes everything; returns the exit code."""
        died = self.worker.died
        failure = died.result() if died.done() else None
        if failure is not None:
            log.critical(_OBITUARY if is_cuda_fault(failure) else "the engine has died", exc_info=failure)
        name = f"prefill worker {self.worker.worker_id}"
        last_word = Leaving(f"{name} has left") if failure is None else Unavailable(f"the engine of {name} has died")
        await self._servicer.end_sessions(last_word, flush_seconds=LAST_WORDS_SECONDS)
        if self._registration is not None and self._registering is not None:
            if failure is None:
                await self._registration.leave()
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        self._health.shutdown()
        await self.worker.close()
        return 0 if failure is None else 1

    async def stop_listening(self) -> None:
        """Calls still open, health watchers among them, get a moment to end."""
        await self._server.stop(grace=0.5)
        await self._tracing.close(timeout_seconds=LAST_SPANS_SECONDS)

    def _profile(self, engine: EngineDescription) -> WorkerProfile:
        return WorkerProfile(
            worker_id=self.worker.worker_id,
            role="prefill",
            address=str(self._config.advertise or self._address),
            compatibility=engine.compatibility,
            device=self._config.shown_device,
            total_pages=engine.pool_pages,
            max_running=self._config.max_running,
            version=VERSION,
            chunk_tokens=self._config.chunk_tokens,
            max_requests=self._config.max_requests,
        )

    def _make_engine(self, on_event: Callable[[Any], None]) -> EngineHandle:
        if self._simulation is not None:
            return make_sim_engine(self._config, self._memory, self._simulation, on_event)
        from prefill_worker.build import build_core

        return make_engine(self._config.engine, partial(build_core, self._config, self._memory), on_event=on_event)


async def serve(config: Config, stop: Stop) -> int:
    """The process's main: from start to exit code."""
    log.info("prefill worker %s: %s", VERSION, describe(config))
    config.warn_of_no_router(log)
    metrics_port = start_metrics_server(config.metrics_port, role="prefill")
    security = Security(config)
    async with Announcement(config.router, "prefill", connect=security.connect) as announcement:
        # In a thread: it imports torch, and the announcement is to be out before.
        with stop.at_once():
            memory = await asyncio.to_thread(make_memory, config)
        server = PrefillServer(config, memory=memory, security=security)
        return await _run(server, config, stop, announcement=announcement, metrics_port=metrics_port)


async def _run(server: PrefillServer, config: Config, stop: Stop, *, announcement: Announcement, metrics_port: int | None) -> int:
    try:
        address = await server.listen()
        log.info("listening on %s%s", address, f", metrics on 127.0.0.1:{metrics_port}" if metrics_port else "")
        loading = server.load(announcement=announcement)
        if config.engine == "process":
            await stop.or_end(loading)  # The engine's process is ended as it is.
        else:
            with stop.at_once(address):
                await loading
        if not stop.requested.is_set():
            tell(f"prefill worker ready on {address}")
        return await server.ended(stop)
    finally:
        await server.stop_listening()
