"""A decode worker over the fake runner, served by real gRPC in this process, and the other two roles as a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from common.address import Address
from common.core import Batch, Req
from common.engine.engines import make_engine
from common.engine.handle import Emit
from common.handoff.base import page_checksum, tokens_of
from common.handoff.cuda_ipc import PoolExport
from common.handoff.pool_memory import PoolMemory
from common.handoff.staging import Staging
from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2, handoff_pb2_grpc, prefill_pb2
from common.rpc.server import bind, make_server
from common.wire import req_to_pb, token_to_pb
from common.worker_wire import compatibility_to_pb
from decode_worker.core import DecodeCore
from decode_worker.metrics import DecodeMetrics
from decode_worker.server import add_services
from decode_worker.worker import DecodeWorker
from tests.helpers.decode_core import EPOCH, first_tokens
from tests.helpers.eventually import eventually
from tests.helpers.fake_cuda import FakeCuda, cuda_pool
from tests.helpers.fake_runner import FakeRunner

CALL_SECONDS = 10.0


@dataclass
class Router:
    """One session: everything it was told, in order."""

    call: Any
    told: list[decode_pb2.DecodeSessionResponse] = field(default_factory=list)

    async def read(self) -> None:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            self.told.append(message)

    def tokens(self, uid: int) -> list[Any]:
        return [token for message in self.told for token in message.step.tokens if token.uid == uid]

    def has_finished(self, uid: int) -> bool:
        return any(token.finish for token in self.tokens(uid))

    async def cancel(self, uid: int, attempt: int = 1) -> None:
        cancel = prefill_pb2.CancelWork(uid=uid, attempt=attempt)
        await self.call.write(decode_pb2.DecodeSessionRequest(cancel=cancel))


class Peers:
    """What router and prefill worker ask of one decode worker."""

    def __init__(self, channel: grpc.aio.Channel, worker: DecodeWorker, runner: FakeRunner, address: Address) -> None:
        self.worker, self.runner, self.address = worker, runner, address
        self.decode = decode_pb2_grpc.DecodeServiceStub(channel)
        self.handoff = handoff_pb2_grpc.HandoffServiceStub(channel)
        self._readers: list[asyncio.Task[None]] = []

    async def session(self, epoch: int = EPOCH, *, read: bool = True) -> Router:
        call = self.decode.Session()
        hello = prefill_pb2.SessionHello(router_epoch=epoch)
        await call.write(decode_pb2.DecodeSessionRequest(hello=hello))
        opened = await call.read()
        assert opened.opened.worker_id == self.worker.worker_id
        router = Router(call)
        if read:
            self._readers.append(asyncio.create_task(_quietly(router.read())))
        return router

    async def pair(self) -> decode_pb2.PairResponse:
        request = decode_pb2.PairRequest(
            prefill_worker="prefill-test", compatibility=compatibility_to_pb(self.runner.compatibility)
        )
        response: decode_pb2.PairResponse = await self.decode.Pair(request, timeout=CALL_SECONDS)
        return response

    def reserve(self, req: Req, pair_id: str, *, transport: str = "grpc", verify: bool = False) -> Any:
        """The call; awaiting it gives the ReserveResponse."""
        request = decode_pb2.ReserveRequest(pair_id=pair_id, req=req_to_pb(req), transport=transport, verify=verify)
        return self.decode.Reserve(request, timeout=CALL_SECONDS)

    def page_bytes_of(self, req: Req, granted: decode_pb2.ReserveResponse) -> list[bytes]:
        """The KV of a ticket's pages as a prefill worker's pool would hold it."""
        size = self.runner.compatibility.page_size
        scratch = FakeRunner(num_pages=1, page_size=size).pool
        pages = []
        for index in range(len(granted.page_ids)):
            scratch.tensor.zero_()
            for position in tokens_of(index, input_len=len(req.input_ids), prefix_len=granted.prefix_len, page_size=size):
                scratch.k(0)[0, position % size, 0, 0] = float(req.input_ids[position] + 1)
                scratch.v(0)[0, position % size, 0, 0] = float(position + 1)
            pages.append(bytes(scratch.page_view(0)))
        return pages

    @property
    def free_slots(self) -> int:
        """Of a worker that has any."""
        slots = self.worker._slots
        assert slots is not None
        return len(slots)

    def frame(self, ticket: str, data: bytes, *, page_index: int = 0) -> handoff_pb2.KvFrame:
        return handoff_pb2.KvFrame(ticket=ticket, page_index=page_index, offset=0, data=data, crc32=page_checksum(data))

    async def push(self, ticket: str, pages: Sequence[bytes]) -> handoff_pb2.PushResponse:
        frames = [self.frame(ticket, page, page_index=index) for index, page in enumerate(pages)]
        response: handoff_pb2.PushResponse = await self.handoff.Push(iter(frames), timeout=CALL_SECONDS)
        return response

    async def commit(self, req: Req, granted: decode_pb2.ReserveResponse, *, crcs: Sequence[int] = ()) -> None:
        await self.decode.Commit(commit_request(req, granted, crcs=crcs), timeout=CALL_SECONDS)

    async def release(self, ticket: str, *, drained: bool = True) -> None:
        await self.decode.Release(decode_pb2.ReleaseRequest(ticket=ticket, drained=drained), timeout=CALL_SECONDS)

    async def hand_over(self, req: Req, pair_id: str) -> None:
        """Reserve, Push and Commit over grpc."""
        granted = await self.reserve(req, pair_id)
        pages = self.page_bytes_of(req, granted)
        if pages:
            await self.push(granted.ticket, pages)
        await self.commit(req, granted)

    async def assert_idle(self, *, within: float = 2.0) -> None:
        async def idle() -> bool:
            counts = await self.worker.check()
            load = self.worker.load()
            assert (counts.held, counts.quarantined) == (0, 0), counts
            assert (load.running, load.waiting) == (0, 0), load
            return True

        await eventually(idle, within=within)

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        for outcome in await asyncio.gather(*self._readers, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome


def commit_request(req: Req, granted: decode_pb2.ReserveResponse, *, crcs: Sequence[int] = ()) -> decode_pb2.CommitRequest:
    return decode_pb2.CommitRequest(
        ticket=granted.ticket,
        first_tokens=map(token_to_pb, first_tokens(req)),
        pages_sent=len(granted.page_ids),
        page_crc32=crcs,
    )


def do_nothing(batch: Batch) -> None:
    pass


def fake_worker(
    *,
    pages: int = 32,
    page_size: int = 4,
    max_running: int = 8,
    lease: timedelta = timedelta(seconds=10),
    before_run: Callable[[Batch], None] = do_nothing,
    offer_shm: bool = True,
    slots: int = 0,
    cuda: FakeCuda | None = None,
    export: PoolExport | None = None,
    engine: str = "thread",
) -> tuple[DecodeWorker, FakeRunner]:
    """Not started; lives in the running event loop. slots: so many in front of a pool that the event loop cannot address. cuda:
    the GPU that its pool is on, and then shm is not offered. export: offered instead of the pool that it has, for tests that
    store and do not decode. engine: "process": the runner returned is not the one that runs."""
    memory = PoolMemory(slots or pages, 2 * 4 * page_size)
    if cuda is not None:
        memory, export = cuda_pool(cuda, num_pages=pages, page_bytes=2 * 4 * page_size)
    make_runner = partial(FakeRunner, num_pages=pages, page_size=page_size, rows=max_running, before_run=before_run)
    runner = make_runner(storage=None if slots else memory.view)
    build = partial(
        _build_core, memory, make_runner, runner if engine == "thread" else None,
        staged=slots > 0, max_running=max_running, lease=lease, cuda_pool=export,
    )  # fmt: skip
    offer_shm = offer_shm and not slots and cuda is None
    worker = DecodeWorker(
        "decode-test",
        make_engine=lambda on_event: make_engine(engine, build, on_event=on_event),
        memory=memory,
        offer_shm=offer_shm,
        metrics=DecodeMetrics(registry=CollectorRegistry()),
        staged=slots > 0,
    )
    return worker, runner


def _build_core(
    memory: PoolMemory,
    make_runner: Callable[..., FakeRunner],
    runner: FakeRunner | None,
    emit: Emit,
    *,
    staged: bool,
    **settings: Any,
) -> DecodeCore:
    """runner: None in a process of its own, which makes one over the memory that came with it."""
    runner = runner or make_runner(storage=None if staged else memory.view)
    staging = Staging(memory, runner.pool) if staged else None
    return DecodeCore(runner, pool_pages=runner.pool.num_pages, emit=emit, staging=staging, **settings)


@asynccontextmanager
async def decode_worker(**shape: Any) -> AsyncIterator[Peers]:
    """A fake_worker(**shape) served on loopback for as long as the block runs."""
    worker, runner = fake_worker(**shape)
    server = make_server()
    add_services(server, worker)
    address = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    await worker.start()
    async with make_channel(address) as channel:
        peers = Peers(channel, worker, runner, address)
        try:
            yield peers
        finally:
            await peers.close()
            await server.stop(0.1)
            await worker.close()


async def _quietly(reading: Any) -> None:
    try:
        await reading
    except grpc.aio.AioRpcError:
        pass
