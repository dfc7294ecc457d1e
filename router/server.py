"""The router process: its parts put together, and its staged end.

Start: model folder -> server listening (health: NOT_SERVING) -> workers register -> a pair is there: SERVING, "router ready".
End:   health NOT_SERVING -> nobody is let in -> running requests get `grace` -> the rest end UNAVAILABLE -> exit 0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from datetime import timedelta
from typing import NoReturn

from common.address import Address
from common.config import describe
from common.errors import Unavailable
from common.metrics import start_metrics_server
from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2_grpc, registry_pb2_grpc
from common.rpc.health import Health
from common.rpc.process import Stop, end_now
from common.rpc.security import Security
from common.tracing import LAST_SPANS_SECONDS, NO_TRACING, Tracing, start_tracing
from common.version import VERSION
from router.admission import Admission
from router.caller import CallerKeys
from router.cluster_view import ClusterView
from router.config import RouterConfig
from router.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.fleet.local_prefill import LocalPrefill
from router.fleet.policies import Placer
from router.fleet.registry import Registry
from router.fleet.registry_servicer import RegistryServicer
from router.metrics import RouterMetrics
from router.pacing import Rounds
from router.pipeline import Pipeline
from router.queueing.request_queue import RequestQueue
from router.queueing.room import RoomRule
from router.readiness import Readiness
from router.served_model import ServedModel
from router.servicer import GenerationServicer

LAST_STATUSES = timedelta(seconds=2)
"""For the statuses of the calls that the end of grace cut off to reach their clients."""

LAST_BYTES = timedelta(seconds=0.2)
"""For what has been written to reach the clients' side of their connections."""

log = logging.getLogger(__name__)


class Router:
    """Everything in one router process, also usable inside a test's event loop."""

    def __init__(
        self, config: RouterConfig, *, metrics: RouterMetrics, rng: random.Random, tracing: Tracing = NO_TRACING
    ) -> None:
        """Raises StartError if the model folder cannot be used."""
        epoch = rng.getrandbits(64)
        self._grace = config.grace
        self._listen = config.listen
        self._security = _security(config)
        model = _model(config)
        self.dispatch = Dispatch()
        self.registry = Registry(fingerprint=model.fingerprint, remember=config.return_wait)
        placer = Placer(config.policy, seed=rng.getrandbits(64), local=LocalPrefill(queue_tokens=config.local_prefill_queue))
        self.fleet = Fleet(
            self.registry,
            placer=placer,
            epoch=epoch,
            receiver=self.dispatch,
            pair_wait=config.pair_wait,
            return_wait=config.return_wait,
            peer_silence=config.peer_silence,
            connect=self._security.connect,
        )
        self.queue = RequestQueue(self.fleet, rule=RoomRule(config.queue_tokens), longest_wait=config.queue_wait)
        self.admission = Admission(max_queue=config.max_queue, max_in_flight=config.max_in_flight, line=self.queue)
        rounds = Rounds(active_streams=lambda: self.admission.streaming)
        pipeline = Pipeline(
            model=model,
            admission=self.admission,
            fleet=self.fleet,
            queue=self.queue,
            dispatch=self.dispatch,
            rounds=rounds,
            metrics=metrics,
            tracing=tracing,
            epoch=epoch,
            max_attempts=config.max_attempts,
            rng=rng,
            slow_client_timeout=config.slow_client_timeout,
            log_prompts=config.log_prompts,
        )
        metrics.watch(admission=self.admission, queue=self.queue, dispatch=self.dispatch, fleet=self.fleet, rounds=rounds)
        self._server = self._security.make_server()
        self._health = Health(self._server, (Readiness.GENERATION, Readiness.REGISTRY), others=self._security.services)
        keys = CallerKeys(session=config.session_key, tenant=config.tenant_key)
        view = ClusterView(fleet=self.fleet, admission=self.admission, queue=self.queue, dispatch=self.dispatch, metrics=metrics)
        self._generation_servicer = GenerationServicer(pipeline, model=model, fleet=self.fleet, caller_keys=keys, view=view)
        self._readiness: Readiness
        self._registry_servicer = RegistryServicer(self.registry, epoch=epoch, silence=config.worker_silence)

    async def start(self) -> Address:
        """Listens; returns the bound address. Raises StartError."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation_servicer, self._server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self._registry_servicer, self._server)
        address = await self._security.bind(self._server, self._listen)
        self._readiness = Readiness(self.fleet, self._health, address=address)
        self.registry.listen(self._readiness)
        await self._server.start()
        self._health.set(Readiness.REGISTRY, True)
        return address

    async def stop(self) -> None:
        await self.drain()
        await self._server.stop(grace=0.5)

    async def drain(self) -> None:
        """Stage by stage, in at most grace and a few seconds. From its end on new calls are still refused."""
        self._readiness.close()
        self._health.shutdown()
        self.admission.close("the router is shutting down")
        await self._drain(self._grace)
        error = Unavailable(f"the router is shutting down and its grace of {self._grace.total_seconds():g} s is over")
        for stay in self.admission.stays():
            stay.end(error)
        await self._drain(LAST_STATUSES)
        self._registry_servicer.close()
        await self.fleet.close()

    async def _drain(self, time_left: timedelta) -> None:
        try:
            async with asyncio.timeout(time_left.total_seconds()):
                await self.admission.empty()
        except TimeoutError:
            log.warning("%d requests are still running after %g s", self.admission.in_flight, time_left.total_seconds())


def _security(config: RouterConfig) -> Security:
    return Security(
        config,
        client_tokens=config.auth_token_file,
        operator_tokens=config.operator_token_file,
        max_calls_per_client=config.max_calls_per_client,
    )


def _model(config: RouterConfig) -> ServedModel:
    folder = ModelDir.open(config.model, need_weights=False)
    return ServedModel(folder, max_context=config.max_context, max_prompt_tokens=config.max_prompt_tokens)


def calm_garbage_collection() -> None:
    """What is here at start stays: it is left out of every collection, and collections are rarer. A stream's objects go by
    reference count; the collector's walks over everything else cost 5 % of the router's time and showed as pauses."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def serve(config: RouterConfig, stop: Stop) -> NoReturn:
    """The process's main, to its end."""
    log.info("router %s: %s", VERSION, describe(config))
    metrics_port = start_metrics_server(config.metrics_port, role="router")
    tracing = start_tracing(config.otlp_endpoint, role="router")
    router = Router(config, metrics=RouterMetrics(), rng=random.SystemRandom(), tracing=tracing)
    address = await router.start()
    calm_garbage_collection()
    log.info("listening on %s%s", address, f", metrics on 127.0.0.1:{metrics_port}" if metrics_port else "")
    await stop.requested.wait()
    log.info("stopping: %d requests are running", router.admission.in_flight)
    await router.drain()
    await tracing.close(timeout_seconds=LAST_SPANS_SECONDS)
    await asyncio.sleep(LAST_BYTES.total_seconds())
    log.info("stopped")
    end_now(0, address=address)
