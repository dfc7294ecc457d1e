"""A decode worker's process: what is built in which order, and taken down in which.

up    announced to the routers -> listen, healthy but NOT_SERVING -> the engine loads the model -> SERVING -> registered with them
down  NOT_SERVING, reported as draining -> finish what runs -> hand the rest back -> close sessions, goodbye -> server -> engine
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from common.address import Address
from common.config import describe
from common.engine.engines import make_engine
from common.engine.handle import EngineDescription, EngineHandle
from common.engine.sim.start import Simulation
from common.engine.start import make_memory
from common.handoff.pool_memory import PoolMemory
from common.log_output import tell
from common.metrics import REGISTRY, start_metrics_server
from common.rpc.announcement import Announcement
from common.rpc.channels import Connect
from common.rpc.duty import Duty
from common.rpc.gen.pdserve.v1 import decode_pb2_grpc, handoff_pb2_grpc
from common.rpc.health import Health
from common.rpc.process import Stop
from common.rpc.registration import Registration
from common.rpc.security import Security
from common.rpc.server import ROUTER_SILENCE
from common.token_ids import plain_ids, tensor_ids
from common.tracing import LAST_SPANS_SECONDS, start_tracing
from common.version import VERSION
from common.work import WorkerProfile
from decode_worker.config import Config
from decode_worker.handoff_servicer import HandoffServicer
from decode_worker.metrics import DecodeMetrics
from decode_worker.servicer import DecodeServicer
from decode_worker.simulation import make_sim_engine
from decode_worker.worker import DecodeWorker

SERVICES = ("pdserve.v1.DecodeService", "pdserve.v1.HandoffService")
LAST_CALLS = timedelta(seconds=1)
"""How long calls under way may take to end once everything else is done."""
log = logging.getLogger(__name__)


async def serve(config: Config, stop: Stop) -> int:
    """One decode worker from start to end; the process's exit code. Raises StartError if it cannot start."""
    log.info("decode worker %s: %s", VERSION, describe(config))
    config.warn_of_no_router(log)
    if (port := start_metrics_server(config.metrics_port, role="decode")) is not None:
        log.info("metrics on 127.0.0.1:%d", port)
    security = Security(config)
    async with Announcement(config.router, "decode", connect=security.connect) as announcement:
        # In a thread: it imports torch, and the announcement is to be out before.
        with stop.at_once():
            memory = await asyncio.to_thread(make_memory, config)
        worker = make_worker(config, memory=memory)
        return await run_worker(worker, config, stop, security=security, announcement=announcement)


async def run_worker(
    worker: DecodeWorker, config: Config, stop: Stop, *, security: Security, announcement: Announcement | None = None
) -> int:
    """The same with a worker that is not yet started. announcement: ended once the routers know the worker itself."""
    server = security.make_server(silence=ROUTER_SILENCE)
    health = Health(server, SERVICES, others=security.services)
    add_services(server, worker, longest=config.request_timeout)
    address = await security.bind(server, config.listen)
    await server.start()
    try:
        if config.engine == "process":
            engine = await stop.or_end(worker.start())  # The engine's process is ended as it is.
        else:
            with stop.at_once(address):
                engine = await worker.start()
        if engine is None:
            return 0
        profile = _profile(config, worker, engine, address)
        return await _serve(worker, health, profile, config, stop, connect=security.connect, announcement=announcement)
    finally:
        health.shutdown()
        await server.stop(LAST_CALLS.total_seconds())
        await worker.close()
        await worker.traces.close(timeout_seconds=LAST_SPANS_SECONDS)


def make_worker(
    config: Config, *, memory: PoolMemory, simulation: Simulation | None = None, registry: CollectorRegistry = REGISTRY
) -> DecodeWorker:
    """The worker with its engine, not yet started. memory: as make_memory() makes it.

    simulation, registry: for a simulated worker that shares its process with others; the first defaults to its own."""
    worker_id = f"decode-{secrets.token_hex(4)}"
    return DecodeWorker(
        worker_id,
        make_engine=partial(_make_engine, config, memory, simulation),
        memory=memory,
        metrics=DecodeMetrics(registry=registry),
        tracing=start_tracing(config.otlp_endpoint, role="decode", instance=worker_id),
        offer_shm=(config.shm or config.is_simulated) and not config.on_cuda,
        staged=config.on_cuda,
        make_ids=plain_ids if config.is_simulated else tensor_ids,
    )


def _make_engine(
    config: Config, memory: PoolMemory, simulation: Simulation | None, on_event: Callable[[Any], None]
) -> EngineHandle:
    if config.is_simulated:
        return make_sim_engine(config, memory, simulation or Simulation(config), on_event)
    from decode_worker.build import build_core

    return make_engine(config.engine, partial(build_core, config, memory), on_event=on_event)


def add_services(server: grpc.aio.Server, worker: DecodeWorker, *, longest: timedelta = timedelta(minutes=10)) -> None:
    """longest: see DecodeServicer."""
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(worker, longest=longest), server)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(worker), server)


async def _serve(
    worker: DecodeWorker,
    health: Health,
    profile: WorkerProfile,
    config: Config,
    stop: Stop,
    *,
    connect: Connect,
    announcement: Announcement | None,
) -> int:
    """From ready to left; the exit code."""
    duty = Duty(worker, grace=config.grace, set_serving=partial(_set_serving, health))
    registration = Registration(
        routers=config.router,
        profile=profile,
        load=worker.load,
        on_drain=duty.drain,
        on_undrain=duty.undrain,
        connect=connect,
    )
    duty.on_change = registration.changed
    duty.begin()
    registering = asyncio.create_task(registration.run())
    if announcement is not None:
        announcement.ends_after(registration.answered())
    tell(f"decode worker ready on {profile.address}")
    try:
        await duty.over(stop, registering=registering)
        if not worker.died.done():
            await worker.say_goodbye()
            await registration.leave()
    finally:
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)
    if worker.died.done():
        log.error("the engine has died", exc_info=worker.died.result())
        return 1
    return 0


def _set_serving(health: Health, serving: bool) -> None:
    for service in SERVICES:
        health.set(service, serving)


def _profile(config: Config, worker: DecodeWorker, engine: EngineDescription, address: Address) -> WorkerProfile:
    return WorkerProfile(
        worker_id=worker.worker_id,
        role="decode",
        address=str(config.advertise or address),
        compatibility=engine.compatibility,
        device=config.shown_device,
        total_pages=engine.pool_pages,
        max_running=config.max_running,
        version=VERSION,
        local_prefill=config.local_prefill == "always",
        chunk_tokens=config.chunk_tokens if config.prefills else 0,
        local_prefill_tokens=config.local_prefill_tokens if config.local_prefill == "short" else 0,
        max_requests=config.max_requests if config.prefills else 0,
    )
