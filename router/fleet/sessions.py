"""The router's Session streams: one to each registered worker, reopened with back-off for as long as it is registered. A worker
that leaves ends its session itself, after its last words."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from common.errors import Leaving, PdserveError, Unavailable
from common.rpc.channels import error_of
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router.fleet.workers import Departure, Worker, WorkerState

OPEN_TIMEOUT_SECONDS = 5.0
BACKOFF_SECONDS = (0.05, 1.0)
QUEUE_MESSAGES = 20_000
"""Outgoing messages a worker may fall behind by. Beyond it the session is ended, and with it all work on that worker."""

END: Any = grpc.aio.EOF
log = logging.getLogger(__name__)


class SessionReceiver(Protocol):
    """What sessions tell; called in the event loop; must not block."""

    def prefill_message(self, worker: Worker, message: prefill_pb2.PrefillSessionResponse) -> None: ...

    def decode_message(self, worker: Worker, message: decode_pb2.DecodeSessionResponse) -> None: ...

    def session_ended(self, worker: Worker, error: PdserveError) -> None:
        """Everything under way on that worker is gone."""


class Session:
    """One worker's stream. Only its writer task writes to the call: two writers on one aio call stall it."""

    def __init__(
        self,
        worker: Worker,
        *,
        channel: grpc.aio.Channel,
        epoch: int,
        receiver: SessionReceiver,
        on_change: Callable[[], None],
    ) -> None:
        """channel: to the worker; run() closes it. on_change: called when has_session of the worker has changed."""
        self.worker = worker
        self._hello = prefill_pb2.SessionHello(router_epoch=epoch)
        self._on_change = on_change
        self._receiver = receiver
        self._channel = channel
        self._call: Any = None
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue(QUEUE_MESSAGES)
        is_prefill = worker.role == "prefill"
        self._request = prefill_pb2.PrefillSessionRequest if is_prefill else decode_pb2.DecodeSessionRequest
        stub = prefill_pb2_grpc.PrefillServiceStub if is_prefill else decode_pb2_grpc.DecodeServiceStub
        self._stub: Any = stub(self._channel)
        self._receive: Any = receiver.prefill_message if is_prefill else receiver.decode_message

    @property
    def num_unsent(self) -> int:
        """Messages that wait to be sent."""
        return self._outgoing.qsize()

    def submit(self, submit: prefill_pb2.Submit) -> None:
        """To a prefill worker, or a decode worker with local_prefill. Dropped if the session has just ended: then session_ended
        tells about the attempt too."""
        if self.worker.role == "prefill":
            self._send(prefill_pb2.PrefillSessionRequest(submit=submit))
        else:
            self._send(decode_pb2.DecodeSessionRequest(prefill=decode_pb2.Prefill(req=submit.req)))

    def cancel(self, uid: int, attempt: int) -> None:
        """Dropped without a session: the worker cancels everything of it when it ends."""
        self._send(self._request(cancel=prefill_pb2.CancelWork(uid=uid, attempt=attempt)))

    def inquire(self, uid: int, attempt: int) -> None:
        """Of a decode worker. Dropped without a session: then session_ended tells about the attempt."""
        self._send(decode_pb2.DecodeSessionRequest(inquire=decode_pb2.Inquire(uid=uid, attempt=attempt)))

    async def flush_prefix_cache(self, *, timeout: float) -> int:
        """Pages the worker freed. Raises what the call failed with, naming the worker."""
        try:
            response = await self._stub.FlushPrefixCache(prefill_pb2.FlushPrefixCacheRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{self.worker} did not flush its prefix cache: {error_of(error)}") from None
        except grpc.aio.UsageError:
            raise Unavailable(f"{self.worker} did not flush its prefix cache: it has just left") from None
        return int(response.pages_freed)

    async def run(self) -> None:
        """Until cancelled, or the session of a worker that has left has ended."""
        failures = 0
        try:
            while True:
                opened, error = await self._hold()
                failures = 1 if opened else failures + 1
                self.worker.trouble = str(error)
                self._log_end(error, is_first=failures == 1)
                if self.worker.departure is not None:
                    return
                if not opened:
                    self._on_change()
                low, high = BACKOFF_SECONDS
                await asyncio.sleep(min(high, low * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))
        finally:
            await self._channel.close(None)

    def _log_end(self, error: PdserveError, *, is_first: bool) -> None:
        expected = isinstance(error, Leaving) or self.worker.state is WorkerState.DRAINING
        level = logging.DEBUG if not is_first else logging.INFO if expected else logging.WARNING
        log.log(level, "session with %s: %s", self.worker, error)

    def _send(self, message: Any) -> None:
        if not self.worker.has_session:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            # A worker that does not read cannot be told to cancel either; ending the session does.
            self._call.cancel()

    async def _hold(self) -> tuple[bool, PdserveError]:
        """Opens a session and serves it to its end. Returns whether it opened, and why it ended."""
        self._call = self._stub.Session()
        writer: asyncio.Task[None] | None = None
        error: PdserveError = Unavailable("the session was closed")
        try:
            await self._open()
            writer = asyncio.create_task(self._write())
            await self._read()
        except PdserveError as caught:
            # Without its traceback, which has this frame and so the call: such a ring keeps the connection until the next full
            # garbage collection.
            error = caught.with_traceback(None)
        except grpc.aio.AioRpcError as caught:
            error = error_of(caught)
            if caught.code() is grpc.StatusCode.UNIMPLEMENTED:
                self.worker.is_elsewhere = True
                error = Unavailable(f"what answers there is no {self.worker.role} worker")
        except TimeoutError:
            error = Unavailable(f"no answer within {OPEN_TIMEOUT_SECONDS:g} s")
        except asyncio.CancelledError:
            if _is_asked_to_end():
                in_order = self.worker.departure is Departure.IN_ORDER
                error = (Leaving if in_order else Unavailable)(self.worker.lost_because or "the router is shutting down")
                raise
            error = Unavailable(f"it fell {QUEUE_MESSAGES} messages behind")
        except Exception:
            log.exception("session with %s failed", self.worker)
            error = Unavailable("internal error in its session")
        finally:
            self._call.cancel()
            if writer is not None:
                writer.cancel()
                self._closed(error)
        return writer is not None, error

    async def _open(self) -> None:
        async with asyncio.timeout(OPEN_TIMEOUT_SECONDS):
            await self._call.write(self._request(hello=self._hello))
            first = await self._call.read()
        if first is END:
            raise Unavailable(f"ended before it opened: {await self._call.details()}")
        if first.opened.worker_id != self.worker.id:
            self.worker.is_elsewhere = True
            raise Unavailable(f"{first.opened.worker_id!r} answers at {self.worker.profile.address}")
        self._outgoing = asyncio.Queue(QUEUE_MESSAGES)
        self.worker.has_session = True
        self.worker.is_elsewhere = False
        self.worker.trouble = ""
        log.info("session with %s stands", self.worker)
        self._on_change()

    async def _read(self) -> None:
        while (message := await self._call.read()) is not END:
            self._receive(self.worker, message)
        raise Unavailable(await self._call.details() or "closed by the worker")

    async def _write(self) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # The reader learns of it too, with the reason.

    def _closed(self, error: PdserveError) -> None:
        self.worker.has_session = False
        self.worker.trouble = str(error)
        # A draining worker's own word is lost if a write was under way when it ended the session.
        in_order = isinstance(error, Leaving) or self.worker.state is WorkerState.DRAINING
        kind = Leaving if in_order else Unavailable
        self._on_change()  # First: what was under way there is not to be placed there again.
        self._receiver.session_ended(self.worker, kind(f"{self.worker}: {error}"))


def _is_asked_to_end() -> bool:
    """A function of its own: a frame that has its own task in it is a ring, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
