"""A prefill worker's service over a stand, and a router's session with it, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc

from common.address import Address
from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import prefill_pb2, prefill_pb2_grpc
from common.rpc.server import bind, make_server
from common.wire import req_to_pb
from prefill_worker.servicer import PrefillServicer
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import FakeDecode, waits
from tests.helpers.prefill_core import EPOCH, make_req
from tests.helpers.prefill_stand import PrefillStand

Request = prefill_pb2.PrefillSessionRequest
Response = prefill_pb2.PrefillSessionResponse


class Router:
    """One session, as a router would hold it."""

    def __init__(self, stub: Any, decode: FakeDecode) -> None:
        self.call = stub.Session()
        self._decode = decode

    async def hello(self, epoch: int = EPOCH) -> Response:
        await self.call.write(Request(hello=prefill_pb2.SessionHello(router_epoch=epoch)))
        return await self.read()

    async def submit(self, ids: Sequence[int], *, uid: int = 1, deadline_ms: int = 0, **fields: Any) -> None:
        decode = fields.pop("decode", self._decode)
        submit = prefill_pb2.Submit(req=req_to_pb(make_req(ids, uid=uid, **fields)))
        submit.req.deadline_ms = deadline_ms
        if decode is not None:
            submit.decode_address, submit.decode_worker = decode.address, decode.worker_id
        await self.call.write(Request(submit=submit))

    async def cancel(self, uid: int, attempt: int = 1) -> None:
        await self.call.write(Request(cancel=prefill_pb2.CancelWork(uid=uid, attempt=attempt)))

    async def read(self) -> Response:
        message = await asyncio.wait_for(self.call.read(), 5)
        assert isinstance(message, Response), "the session ended"
        return message

    async def kinds(self, count: int) -> list[str]:
        return [str((await self.read()).WhichOneof("message")) for _ in range(count)]

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end; how the worker ended the stream."""
        try:
            while await asyncio.wait_for(self.call.read(), 5) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass  # Read ends so unless the status is OK.
        return await self.call.code(), await self.call.details()


class Serving:
    """What a test of the service needs at hand."""

    def __init__(self, stand: PrefillStand, servicer: PrefillServicer, stub: Any) -> None:
        self.stand, self.servicer, self.stub, self.decode = stand, servicer, stub, stand.decode

    def router(self) -> Router:
        return Router(self.stub, self.decode)

    async def open(self, epoch: int = EPOCH) -> Router:
        router = self.router()
        assert (await router.hello(epoch)).opened.worker_id == "prefill-test"
        return router

    async def open_with_reserve_held(self, until: asyncio.Event, ids: Sequence[int], **work: int) -> Router:
        """A router whose one request has asked for pages, and has its answer when the event is set. work: as Router.submit's."""
        self.decode.before["Reserve"] = waits(until)
        router = await self.open()
        await router.submit(ids, **work)
        await eventually(lambda: "Reserve" in self.decode.calls, within=2)
        return router


@asynccontextmanager
async def serving(*, longest: float = 20.0, started: bool = True, **kwargs: Any) -> AsyncIterator[Serving]:
    decode = FakeDecode()
    await decode.start()
    stand = PrefillStand(decode, **kwargs)
    if started:
        await stand.worker.start()
    server = make_server()
    servicer = PrefillServicer(stand.worker, longest=timedelta(seconds=longest))
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    address = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    try:
        async with make_channel(address) as channel:
            yield Serving(stand, servicer, prefill_pb2_grpc.PrefillServiceStub(channel))
            await channel.close(None)
        if started:
            await stand.assert_idle()
    finally:
        await server.stop(None)
        await stand.worker.close()
        await decode.stop()
