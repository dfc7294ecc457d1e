"""RegistryService: one stream per worker, profile first, then its load. The stream's end, or silence, is the worker's loss."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import grpc

from common.errors import InvalidRequest, Unavailable
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from common.wire import load_from_pb, profile_from_pb
from common.work import WorkerProfile
from router.registry import Registry
from router.workers import Worker

END: Any = grpc.aio.EOF
Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, registry: Registry, *, epoch: int, silence: timedelta) -> None:
        """silence: a worker that reports nothing for so long is taken for lost."""
        self._registry = registry
        self._epoch = epoch
        self._silence = silence
        self._streams: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        """Ends every stream; a worker then looks for the next router at this address."""
        for stream in self._streams:
            stream.cancel()

    async def Register(self, request_iterator: Any, context: Context) -> None:
        worker = self._registry.join(await self._read_profile(context))
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        try:
            await context.write(registry_pb2.RouterDirective(accepted=registry_pb2.Accepted(router_epoch=self._epoch)))
            await self._follow(worker, context)
        except Unavailable as error:
            self._registry.leave(worker, str(error))
            raise
        finally:
            self._streams.discard(stream)
            self._registry.leave(worker, "its registration stream ended", with_last_words=True)

    async def _read_profile(self, context: Context) -> WorkerProfile:
        first = await self._read(context)
        if first is None or first.WhichOneof("message") != "profile":
            raise InvalidRequest("message", "must be a profile first", first and first.WhichOneof("message"))
        try:
            return profile_from_pb(first.profile)
        except ValueError as error:
            raise InvalidRequest("profile", str(error), first.profile.worker_id) from None

    async def _follow(self, worker: Worker, context: Context) -> None:
        while (status := await self._read(context)) is not None:
            if status.WhichOneof("message") == "load":
                self._registry.report(worker, load_from_pb(status.load))

    async def _read(self, context: Context) -> registry_pb2.WorkerStatus | None:
        """None at the stream's end."""
        try:
            status = await asyncio.wait_for(context.read(), self._silence.total_seconds())
        except TimeoutError:
            raise Unavailable(f"no report for {self._silence.total_seconds():g} s") from None
        return None if status is END else status
