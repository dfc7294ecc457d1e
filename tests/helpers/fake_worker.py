"""What fake workers of both roles share: a real server that registers and speaks Sessions, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from common.address import Address
from common.rpc.gen.pdserve.v1 import decode_pb2, prefill_pb2
from common.rpc.registration import Registration
from common.rpc.server import bind, make_server
from common.work import Compatibility, PageCounts, Role, WorkerLoad, WorkerProfile


class FakeWorker:
    """What both roles share: a server, a registration, one outgoing queue per session."""

    role: Role
    _all: dict[str, FakeWorker] = {}

    def __init__(self, router: str, compatibility: Compatibility, *, worker_id: str, total_pages: int = 1000) -> None:
        self.worker_id = worker_id
        self.address = ""
        self.load = WorkerLoad(pages=PageCounts(total_pages, 0, 0, 0, total_pages))
        self.cancels: list[tuple[int, int]] = []
        self.flushes = 0
        self.sessions_opened = 0
        self._router = Address.parse(router)
        self._compatibility = compatibility
        self._total_pages = total_pages
        self._sessions: dict[int, asyncio.Queue[Any]] = {}
        self._calls: list[Any] = []
        self._server = make_server()
        self._registration: asyncio.Task[None] | None = None
        self.standing: Registration

    async def start(self, *, listen: str = "127.0.0.1:0") -> None:
        self._add_services(self._server)
        self.address = str(await bind(self._server, Address.parse(listen)))
        await self._server.start()
        FakeWorker._all[self.address] = self
        self.register()

    def register(self) -> None:
        profile = WorkerProfile(
            self.worker_id, self.role, self.address, self._compatibility, "cpu", self._total_pages, max_running=256, version="0"
        )
        self.standing = Registration(routers=[self._router], profile=profile, load=self.report, on_drain=lambda grace, stay: None)
        self._registration = asyncio.create_task(self.standing.run())

    def report(self) -> WorkerLoad:
        """What it tells its router."""
        return self.load

    async def unregister(self) -> None:
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.gather(self._registration, return_exceptions=True)

    async def close(self) -> None:
        """As sudden as a kill: registration, sessions and server end without a word."""
        await self.unregister()
        FakeWorker._all.pop(self.address, None)
        await self._server.stop(0)

    @staticmethod
    def at(address: str) -> FakeWorker | None:
        """The running fake worker at this address."""
        return FakeWorker._all.get(address)

    def break_sessions(self) -> None:
        """Ends every session; the router opens new ones."""
        for queue in self._sessions.values():
            queue.put_nowait(None)

    def send(self, epoch: int, **message: Any) -> None:
        """Dropped without a session."""
        if (queue := self._sessions.get(epoch)) is not None:
            queue.put_nowait(self._response(**message))

    async def serve_session(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        hello = await context.read()
        epoch = hello.hello.router_epoch
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._sessions[epoch] = queue
        self.sessions_opened += 1
        await context.write(self._response(opened=prefill_pb2.SessionOpened(worker_id=self.worker_id)))
        reader = asyncio.create_task(self._read(epoch, context, queue))
        try:
            while (message := await queue.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            if self._sessions.get(epoch) is queue:
                del self._sessions[epoch]
            self.session_closed(epoch)

    async def _read(self, epoch: int, context: grpc.aio.ServicerContext[Any, Any], queue: asyncio.Queue[Any]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("cancel"):
                self.cancels.append((message.cancel.uid, message.cancel.attempt))
                self.cancelled(epoch, message.cancel)
            elif self.role == "decode" and message.HasField("inquire"):
                self.inquired(epoch, message.inquire)
            else:
                self.submitted(message.submit)
        queue.put_nowait(None)

    def _add_services(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _response(self, **message: Any) -> Any:
        raise NotImplementedError

    def is_idle(self) -> bool:
        raise NotImplementedError

    def submitted(self, submit: prefill_pb2.Submit) -> None:
        raise NotImplementedError

    def cancelled(self, epoch: int, cancel: prefill_pb2.CancelWork) -> None:
        raise NotImplementedError

    def inquired(self, epoch: int, inquire: decode_pb2.Inquire) -> None:
        raise NotImplementedError

    def session_closed(self, epoch: int) -> None:
        raise NotImplementedError
