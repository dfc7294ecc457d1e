"""grpc.health.v1 and server reflection, as every process here offers them.

    ""               SERVING while the process is alive, until shutdown()
    a service name   SERVING when a request to it would succeed
    anything else    NOT_FOUND from Check, SERVICE_UNKNOWN from Watch

The library's servicer is not used: there, a watcher that leaves cuts off the others, and a slow one holds up set().
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import NotFound, Unavailable
from common.rpc.reflection import enable_reflection

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """The health of one server's services; lives in the event loop."""

    def __init__(self, server: grpc.aio.Server, services: Sequence[str], *, others: Sequence[str] = ()) -> None:
        """services: full names, "pdserve.v1.DecodeService"; NOT_SERVING until set. Reflection lists them, and others."""
        self._status = {"": SERVING} | dict.fromkeys(services, NOT_SERVING)
        self._changed: defaultdict[str | None, asyncio.Event] = defaultdict(asyncio.Event)
        """By service; None: every unknown name's, which are as many as strangers like."""
        self._shut_down = False
        health_pb2_grpc.add_HealthServicer_to_server(_Servicer(self), server)
        enable_reflection((*services, *others, "grpc.health.v1.Health"), server)

    def set(self, service: str, serving: bool) -> None:
        """Tells every watcher. Raises KeyError for a service not named at construction; after shutdown() does nothing."""
        if service not in self._status:
            raise KeyError(service)
        if not self._shut_down:
            self._set(service, serving)

    def shutdown(self) -> None:
        """Everything is NOT_SERVING for good, and watchers are told and let go, or they would hold up the server's stop."""
        self._shut_down = True
        self._status = dict.fromkeys(self._status, NOT_SERVING)
        while self._changed:  # Watchers of unknown names are among them.
            self._changed.popitem()[1].set()

    def _set(self, service: str, serving: bool) -> None:
        self._status[service] = SERVING if serving else NOT_SERVING
        # Each watcher waits on the event of the moment; the next change gets a new one.
        self._changed.pop(service, asyncio.Event()).set()

    def check(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._status:
            raise NotFound(f"no service {service!r} here; there are {', '.join(sorted(filter(None, self._status)))}")
        return health_pb2.HealthCheckResponse(status=self._status[service])

    async def watch(self, service: str) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and after each change; changes quicker than the watcher reads are merged."""
        last: Any = None
        while True:
            changed = self._changed[service if service in self._status else None]
            status = self._status.get(service, SERVICE_UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
                continue  # It may have changed while the watcher was reading.
            if self._shut_down:
                raise Unavailable("the server is stopping")
            await changed.wait()


class _Servicer(health_pb2_grpc.HealthServicer):
    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        return self._health.check(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async for response in self._health.watch(request.service):
            yield response
