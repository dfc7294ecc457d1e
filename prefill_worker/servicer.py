"""PrefillServicer: PrefillService on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import grpc

from common.errors import Aborted, PdserveError
from common.rpc.gen.pdserve.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_worker.session import Session, read_hello
from prefill_worker.worker import PrefillWorker

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """At most one session per router: a second one means that the router has given up the first."""

    def __init__(self, worker: PrefillWorker, *, longest: timedelta) -> None:
        """longest: how long a request may stay here if its client set no deadline."""
        self._worker = worker
        self._longest = longest
        self._sessions: dict[int, Session] = {}

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    async def Session(self, requests: AsyncIterator[prefill_pb2.PrefillSessionRequest], context: Context) -> None:
        session = Session(await read_hello(requests), worker=self._worker, longest=self._longest)
        epoch = session.router_epoch
        if (former := self._sessions.get(epoch)) is not None:
            former.end(Aborted("the router has opened another session"))
        self._sessions[epoch] = session
        try:
            await session.serve(requests, context.write)
        finally:
            if self._sessions.get(epoch) is session:
                del self._sessions[epoch]

    async def FlushPrefixCache(
        self, request: prefill_pb2.FlushPrefixCacheRequest, context: Context
    ) -> prefill_pb2.FlushPrefixCacheResponse:
        return prefill_pb2.FlushPrefixCacheResponse(pages_freed=await self._worker.flush_prefix_cache())

    async def end_sessions(self, error: PdserveError, *, flush_seconds: float) -> None:
        """Sends what is still to be sent, for so long, and ends every session with this status."""
        for session in list(self._sessions.values()):
            await session.flush(timeout_seconds=flush_seconds)
            session.end(error)
