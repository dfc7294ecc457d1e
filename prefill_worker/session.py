"""Session: one router's stream to this worker. What it asks becomes journeys, what they tell goes out through one writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Final

from common.errors import DeadlineExceeded, InvalidArgument, Leaving, PdserveError, ResourceExhausted, Unavailable
from common.rpc.gen.pdserve.v1 import prefill_pb2
from common.wire import completions_of, failure_to_pb, req_from_pb, token_to_pb
from common.work import TokenOut, WorkFailure
from common.work_key import WorkKey
from prefill_worker.journey import Journey
from prefill_worker.order import Order
from prefill_worker.worker import PrefillWorker

HELLO_SECONDS: Final = 10.0
OUTBOX_MESSAGES: Final = 20_000
"""How far a router may fall behind in reading; beyond it its session is ended, and with it all its work."""

Requests = AsyncIterator[prefill_pb2.PrefillSessionRequest]
Response = prefill_pb2.PrefillSessionResponse


async def read_hello(requests: Requests) -> int:
    """The router's epoch, from the first message. Raises InvalidArgument or DeadlineExceeded."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no hello within {HELLO_SECONDS:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidArgument("the first message of a session must be hello")
    return int(first.hello.router_epoch)


class Session:
    """Event loop only. Implements Report for its journeys."""

    def __init__(self, router_epoch: int, *, worker: PrefillWorker, longest: timedelta) -> None:
        """longest: how long a request may stay if its client set no deadline. Raises Unavailable before the worker is ready."""
        self.router_epoch = router_epoch
        self._worker = worker
        self._journeys = worker.journeys
        self._longest = longest
        self._outbox: asyncio.Queue[Response] = asyncio.Queue(OUTBOX_MESSAGES)
        self._mine: set[Journey] = set()
        """Those that this stream began: a successor's are none of its business."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, requests: Requests, write: Callable[[Response], Awaitable[None]]) -> None:
        """Until the router ends the stream. However this ends, the router's work here is dropped."""
        # By itself: a first message that is cut off half-way takes the call's headers along, and grpc then cannot end the call.
        await _written(write, Response(opened=prefill_pb2.SessionOpened(worker_id=self._worker.worker_id)))
        reader = asyncio.create_task(self._read(requests), name=f"session reader {self.router_epoch:016x}")
        writer = asyncio.create_task(self._write(write), name=f"session writer {self.router_epoch:016x}")
        try:
            done, _ = await asyncio.wait([reader, writer, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            self._drop_work()
            for end in (reader, writer, self._broken):
                end.cancel()
            await asyncio.gather(reader, writer, self._broken, return_exceptions=True)

    def end(self, error: PdserveError) -> None:
        """Drops the router's work here and ends the stream with this status."""
        if not self._broken.done():
            self._drop_work()
            self._broken.set_exception(error)

    @property
    def num_unsent(self) -> int:
        """Messages that wait for the router to read."""
        return self._outbox.qsize()

    async def flush(self, *, timeout_seconds: float) -> None:
        """Waits until everything told so far is sent, at most so long."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._outbox.join()
        except TimeoutError:
            pass

    def started(self, key: WorkKey, *, cached_tokens: int) -> None:
        started = prefill_pb2.PrefillStarted(uid=key.uid, attempt=key.attempt, cached_tokens=cached_tokens)
        self._send(Response(started=started))

    def first_token(self, token: TokenOut) -> None:
        self._send(Response(first_token=token_to_pb(token)))

    def handed_off(self, key: WorkKey) -> None:
        self._send(Response(handed_off=prefill_pb2.HandedOff(uid=key.uid, attempt=key.attempt)))

    def failed(self, failure: WorkFailure) -> None:
        self._send(Response(failure=failure_to_pb(failure)))

    def _send(self, response: Response) -> None:
        """Goes out in order, unless the session is over."""
        if self._broken.done():
            return
        try:
            self._outbox.put_nowait(response)
        except asyncio.QueueFull:
            self.end(ResourceExhausted(f"the router does not read: {OUTBOX_MESSAGES} messages wait for it"))

    def _drop_work(self) -> None:
        for journey in list(self._mine):
            journey.end(None)

    async def _read(self, requests: Requests) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    self._submit(request.submit)
                case "cancel":
                    self._journeys.cancel(WorkKey(self.router_epoch, request.cancel.uid, request.cancel.attempt))
                case None:
                    pass  # Of a kind that only newer routers know, which bear it that nothing comes of it.
                case other:
                    raise InvalidArgument(f"a session takes submit and cancel after its hello, got {other}")

    async def _write(self, write: Callable[[Response], Awaitable[None]]) -> None:
        while True:
            await _written(write, await self._outbox.get())
            self._outbox.task_done()

    def _submit(self, pb: prefill_pb2.Submit) -> None:
        key = WorkKey(self.router_epoch, pb.req.key.uid, pb.req.key.attempt)
        try:
            if self._worker.is_draining:
                raise Leaving("this prefill worker is draining")
            journey = self._journeys.begin(self._order_of(pb), report=self)
        except PdserveError as error:
            self._worker.metrics.refused(error)
            retryable = not isinstance(error, InvalidArgument)
            for offset in completions_of(pb.req):
                self.failed(WorkFailure.of(key.for_completion(offset), error, retryable=retryable))
            return
        if journey is not None:
            self._mine.add(journey)
            journey.task.add_done_callback(lambda _: self._mine.discard(journey))

    def _order_of(self, pb: prefill_pb2.Submit) -> Order:
        """Raises InvalidArgument on a submission that breaks its own rules."""
        if pb.req.key.router_epoch != self.router_epoch:
            raise InvalidArgument(f"router_epoch must be this session's, got {pb.req.key.router_epoch:016x}")
        if pb.req.output_len < 1:
            raise InvalidArgument(f"output_len must be at least 1, got {pb.req.output_len}")
        if pb.req.output_len > 1 and not (pb.decode_address and pb.decode_worker):
            raise InvalidArgument("decode_address and decode_worker must be given when output_len is more than 1")
        try:
            req = req_from_pb(pb.req, make_ids=self._worker.make_ids)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        req.cached_len = 0  # The sender's cache is not this worker's.
        limit = pb.req.deadline_ms / 1000 or self._longest.total_seconds()
        return Order(req, pb.decode_address, pb.decode_worker, deadline=self._worker.clock() + limit)


async def _written(write: Callable[[Response], Awaitable[None]], response: Response) -> None:
    """Raises Unavailable if the stream is over."""
    try:
        await write(response)
    except Exception as error:  # grpc has several for that.
        raise Unavailable("the stream to the router broke") from error
