"""DecodeService over a DecodeWorker: convert, call, convert."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import grpc

from common.core import Req
from common.errors import DeadlineExceeded, InvalidRequest, PdserveError
from common.handoff.cuda_ipc import PoolExport
from common.logs import About, bind
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, work_pb2
from common.wire import completions_of, failure_to_pb, req_from_pb, token_to_pb
from common.work import WorkFailure
from common.work_key import WorkKey
from common.worker_wire import compatibility_from_pb
from decode_worker import commands
from decode_worker.commit_wire import commit_from_pb
from decode_worker.events import Failed, Holding, PrefillStarted, Retracted
from decode_worker.outbox import Message
from decode_worker.sessions import RouterCommand
from decode_worker.worker import DecodeWorker

HELLO_SECONDS: Final = 10.0

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: DecodeWorker, *, longest: timedelta = timedelta(minutes=10)) -> None:
        """longest: how long a prompt may wait for its first token here if its client set no deadline."""
        self._worker = worker
        self._longest = longest

    async def Session(self, request_iterator: AsyncIterator[decode_pb2.DecodeSessionRequest], context: Context) -> None:
        worker = self._worker.ready
        router_epoch = await _hello(request_iterator)

        async def write(message: Message) -> None:
            await context.write(_response(message))

        with worker.sessions.open(router_epoch) as session:
            opened = prefill_pb2.SessionOpened(worker_id=worker.worker_id)
            await context.write(decode_pb2.DecodeSessionResponse(opened=opened))
            said = self._commands(request_iterator, router_epoch, refuse=session.outbox.put)
            await session.run(said, on_command=worker.post, write=write)

    async def _commands(
        self, requests: AsyncIterator[decode_pb2.DecodeSessionRequest], router_epoch: int, *, refuse: Callable[[Failed], None]
    ) -> AsyncIterator[RouterCommand]:
        """refuse: tells the router of a request that breaks its own rules."""
        async for request in requests:
            match request.WhichOneof("message"):
                case "cancel":
                    yield commands.Cancel(WorkKey(router_epoch, request.cancel.uid, request.cancel.attempt))
                case "prefill":
                    try:
                        yield self._prefill(request.prefill.req, router_epoch)
                    except InvalidRequest as error:
                        key = WorkKey(router_epoch, request.prefill.req.key.uid, request.prefill.req.key.attempt)
                        for offset in completions_of(request.prefill.req):
                            refuse(Failed(WorkFailure.of(key.for_completion(offset), error, retryable=False)))
                case "inquire":
                    yield commands.Inquire(WorkKey(router_epoch, request.inquire.uid, request.inquire.attempt))
                case None:
                    pass  # Of a kind that only newer routers know, which bear it that nothing comes of it.
                case other:
                    raise InvalidRequest("message", "must be cancel, prefill or inquire once the session is open", other)

    async def Pair(self, request: decode_pb2.PairRequest, context: Context) -> decode_pb2.PairResponse:
        worker = self._worker.ready
        pair_id = worker.pair(request.prefill_worker, compatibility_from_pb(request.compatibility))
        return decode_pb2.PairResponse(
            decode_worker=worker.worker_id,
            pair_id=pair_id,
            shm_socket=worker.senders.shm_socket,
            page_bytes=worker.description.page_bytes,
            pool_pages=worker.description.pool_pages,
            cuda_pool=_cuda_pool_to_pb(worker.description.cuda_pool, worker.senders.cuda_ipc_socket),
        )

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.ReserveResponse:
        worker = self._worker.ready
        bind(About(request.req.request_id, request.req.key.uid, request.req.key.attempt))
        try:
            granted = await worker.reserve(
                self._req(request.req), pair_id=request.pair_id, transport=request.transport, verify=request.verify
            )
        except PdserveError as error:
            worker.metrics.refused(error)
            raise
        return decode_pb2.ReserveResponse(
            ticket=granted.ticket,
            page_ids=granted.page_ids,
            prefix_len=granted.prefix_len,
            lease_ms=granted.lease // timedelta(milliseconds=1),
        )

    async def Renew(self, request: decode_pb2.RenewRequest, context: Context) -> decode_pb2.RenewResponse:
        return decode_pb2.RenewResponse(lost=await self._worker.ready.renew(tuple(request.tickets)))

    async def Commit(self, request: decode_pb2.CommitRequest, context: Context) -> decode_pb2.CommitResponse:
        bind(self._worker.names.of(request.ticket))
        await self._worker.ready.commit(_commit(request))
        return decode_pb2.CommitResponse()

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Context) -> decode_pb2.ReleaseResponse:
        bind(self._worker.names.of(request.ticket))
        await self._worker.ready.release(commands.Release(request.ticket, drained=request.drained))
        return decode_pb2.ReleaseResponse()

    async def FlushPrefixCache(
        self, request: prefill_pb2.FlushPrefixCacheRequest, context: Context
    ) -> prefill_pb2.FlushPrefixCacheResponse:
        return prefill_pb2.FlushPrefixCacheResponse(pages_freed=await self._worker.ready.flush_prefix_cache())

    def _req(self, pb: work_pb2.Req) -> Req:
        """Raises InvalidRequest."""
        try:
            return req_from_pb(pb, make_ids=self._worker.make_ids)
        except (ValueError, AssertionError) as error:
            raise InvalidRequest("req", "must keep a request's invariants", str(error)) from error

    def _prefill(self, pb: work_pb2.Req, router_epoch: int) -> commands.Prefill:
        """Raises InvalidRequest."""
        if pb.key.router_epoch != router_epoch:
            raise InvalidRequest("router_epoch", "must be this session's", pb.key.router_epoch)
        req = self._req(pb)
        req.cached_len = 0  # The sender's cache is not this worker's.
        return commands.Prefill(req, deadline=time.monotonic() + (pb.deadline_ms / 1000 or self._longest.total_seconds()))


def _cuda_pool_to_pb(export: PoolExport | None, socket_name: str) -> decode_pb2.CudaPool | None:
    return None if export is None else decode_pb2.CudaPool(socket=socket_name, **asdict(export))


async def _hello(requests: AsyncIterator[decode_pb2.DecodeSessionRequest]) -> int:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no hello within {HELLO_SECONDS:g} s") from None
    if first is None or not first.HasField("hello"):
        raise InvalidRequest("hello", "must be the first message of a session", None)
    return int(first.hello.router_epoch)


def _commit(pb: decode_pb2.CommitRequest) -> commands.Commit:
    """Raises InvalidRequest."""
    try:
        return commit_from_pb(pb)
    except ValueError as error:
        raise InvalidRequest("first_tokens", "must be tokens", str(error)) from error


def _response(message: Message) -> decode_pb2.DecodeSessionResponse:
    match message:
        case Retracted(key=key):
            return decode_pb2.DecodeSessionResponse(retracted=decode_pb2.Retracted(uid=key.uid, attempt=key.attempt))
        case Holding(key=key, is_committed=committed):
            return decode_pb2.DecodeSessionResponse(
                holding=decode_pb2.Holding(uid=key.uid, attempt=key.attempt, committed=committed)
            )
        case PrefillStarted(key=key, cached_tokens=cached):
            started = prefill_pb2.PrefillStarted(uid=key.uid, attempt=key.attempt, cached_tokens=cached)
            return decode_pb2.DecodeSessionResponse(started=started)
        case Failed(failure=failure):
            return decode_pb2.DecodeSessionResponse(failure=failure_to_pb(failure))
        case _:
            return decode_pb2.DecodeSessionResponse(step=decode_pb2.Step(tokens=map(token_to_pb, message)))
