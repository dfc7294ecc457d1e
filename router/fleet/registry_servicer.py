"""RegistryService: one stream per worker, profile first, then its load. The stream's end without a goodbye, or silence, is the
worker's loss, unless the same process registers again soon. Workers that have only begun to start announce themselves. Operators
drain workers through it."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import grpc

from common.errors import Aborted, InvalidRequest, Leaving, NotFound, Unavailable
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from common.vigil import Vigil
from common.work import WorkerProfile, role_of
from common.worker_wire import load_from_pb, profile_from_pb
from router.fleet.directives import Directives
from router.fleet.registry import Registry
from router.fleet.workers import Departure, Worker

LOOKS = 8
"""How often in a silence that would end a stream it is looked for."""
END: Any = grpc.aio.EOF
Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, registry: Registry, *, epoch: int, silence: timedelta) -> None:
        """silence: a worker that reports nothing for so long is taken for lost."""
        self._registry = registry
        self._epoch = epoch
        self._silence = silence
        self._directives: dict[Worker, Directives] = {}
        self._is_closed = False

    def close(self) -> None:
        """Says goodbye on every stream, which ends it; a worker then looks for the next router at this address."""
        self._is_closed = True
        for directives in self._directives.values():
            directives.post(registry_pb2.RouterDirective(goodbye=registry_pb2.Goodbye()))

    @property
    def _wordless_end(self) -> tuple[str, Departure]:
        """What it means when a stream ends without a word of the worker's."""
        if self._is_closed:
            return "this router is being stopped", Departure.IN_ORDER
        return "its registration stream ended", Departure.BROKEN

    async def Register(self, request_iterator: Any, context: Context) -> None:
        profile = await self._read_profile(context)
        if self._is_closed:  # Who was told goodbye a moment ago looks for the next router already.
            raise Leaving("this router is being stopped")
        worker = self._registry.join(profile)
        directives = self._directives[worker] = Directives()
        directives.post(registry_pb2.RouterDirective(accepted=registry_pb2.Accepted(router_epoch=self._epoch)))
        sides = [
            asyncio.create_task(self._follow(worker, directives, context)),
            asyncio.create_task(directives.run(context.write)),
        ]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in sides:
                if side.done():
                    side.result()
        except Unavailable as error:
            self._leave(worker, directives, str(error), Departure.SILENT)
            raise
        finally:
            self._leave(worker, directives, *self._wordless_end)
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    def _leave(self, worker: Worker, directives: Directives, reason: str, departure: Departure) -> None:
        """Unless it has registered again meanwhile, on another stream. Idempotent."""
        if self._directives.get(worker) is directives:
            del self._directives[worker]
            self._registry.leave(worker, reason, departure)

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: Context) -> None:
        try:
            role = role_of(request.role)
        except ValueError as error:
            raise InvalidRequest("role", "must be 'prefill' or 'decode'", request.role) from error
        with self._registry.arrivals.announced(role):
            await asyncio.get_running_loop().create_future()  # The call's end cancels it.

    async def DrainWorker(self, request: registry_pb2.DrainWorkerRequest, context: Context) -> registry_pb2.DrainWorkerResponse:
        if request.HasField("grace_ms") and request.grace_ms == 0:
            raise InvalidRequest("grace_ms", "must be at least 1", 0)
        drain = registry_pb2.Drain(grace_ms=request.grace_ms, stay=not request.exit)
        await self._of(request.worker_id).tell(registry_pb2.RouterDirective(drain=drain))
        return registry_pb2.DrainWorkerResponse()

    async def UndrainWorker(
        self, request: registry_pb2.UndrainWorkerRequest, context: Context
    ) -> registry_pb2.UndrainWorkerResponse:
        await self._of(request.worker_id).tell(registry_pb2.RouterDirective(undrain=registry_pb2.Undrain()))
        return registry_pb2.UndrainWorkerResponse()

    def _of(self, worker_id: str) -> Directives:
        # A former self, or a lost worker, may have its stream for a while yet.
        registered = {worker.id: directives for worker, directives in self._directives.items() if worker.lost_at is None}
        if (directives := registered.get(worker_id)) is not None:
            return directives
        known = ", ".join(sorted(registered)) or "none"
        raise NotFound(f"worker_id must be that of a registered worker ({known}), got {worker_id!r}")

    async def _read_profile(self, context: Context) -> WorkerProfile:
        first = await self._read(context)
        if first is None or first.WhichOneof("message") != "profile":
            raise InvalidRequest("message", "must be a profile first", first and first.WhichOneof("message"))
        try:
            return profile_from_pb(first.profile)
        except ValueError as error:
            raise InvalidRequest("profile", str(error), first.profile.worker_id) from None

    async def _follow(self, worker: Worker, directives: Directives, context: Context) -> None:
        while (status := await self._read(context)) is not None:
            if worker.lost_at is not None or self._directives.get(worker) is not directives:
                # Else a worker whose place another took for a moment would report to nobody for ever.
                raise Aborted(f"this registration is over: {worker.lost_because or 'a newer one has begun'}")
            match status.WhichOneof("message"):
                case "load":
                    self._registry.report(worker, load_from_pb(status.load))
                case "goodbye":
                    self._registry.leave(worker, "it was stopped in order", Departure.IN_ORDER)
                    return

    async def _read(self, context: Context) -> registry_pb2.WorkerStatus | None:
        """None at the stream's end. Raises Unavailable for silence."""
        seconds = self._silence.total_seconds()
        tick = seconds / LOOKS
        vigil = Vigil(tick_seconds=tick, now=time.monotonic())
        reading = asyncio.ensure_future(context.read())
        try:
            while not (await asyncio.wait([reading], timeout=tick))[0]:
                if vigil.look(time.monotonic()) >= seconds:
                    raise Unavailable(f"no report for {seconds:g} s")
            status = reading.result()
        finally:
            reading.cancel()
        return None if status is END else status
