"""The senders put the very bytes of our pages into a pool that another process owns, and say clearly when they cannot."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import DataLoss, FailedPrecondition, PdserveError, Unavailable
from common.handoff.base import FRAME_BYTES, receive_welcome, send_welcome
from common.handoff.choose import choose
from common.handoff.grpc_sender import GrpcSender
from common.handoff.shm_link import ShmLink
from common.handoff.shm_sender import ShmSender
from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import handoff_pb2, handoff_pb2_grpc
from tests.helpers.eventually import eventually
from tests.helpers.pool_owner import PoolOwner

pytestmark = pytest.mark.unit
SMALL, LARGE = 192, FRAME_BYTES + 777
QUICK = timedelta(milliseconds=300)


@pytest.fixture(scope="module")
def owner() -> Iterator[PoolOwner]:
    with PoolOwner(num_pages=8, page_bytes=SMALL) as owner:
        yield owner


def random_pages(count: int, page_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(secrets.token_bytes(page_bytes))) for _ in range(count)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def map_pool(owner: PoolOwner, page_bytes: int = SMALL) -> tuple[ShmSender, Any]:
    transport, link = await choose("auto", shm_socket=owner.shm_socket, pair_id=owner.pair_id)
    assert transport == "shm" and link is not None
    sender = ShmSender(link.descriptor, pool_bytes=link.pool_bytes, page_bytes=page_bytes)
    link.close_descriptor()
    return sender, link


async def test_shm_writes_whole_pages_bit_exact_into_another_process(owner: PoolOwner) -> None:
    sender, link = await map_pool(owner)
    before, ours = owner.pages(), random_pages(3, SMALL)
    for page_id, page in zip((5, 0, 7), ours, strict=True):
        sender.write(page_id, page)
    sender.close()
    link.close()
    after = owner.pages()
    assert [after[5], after[0], after[7]] == [bytes(page) for page in ours]
    assert [after[i] for i in (1, 2, 3, 4, 6)] == [before[i] for i in (1, 2, 3, 4, 6)]


async def test_shm_refuses_a_page_outside_the_pool_and_half_a_page(owner: PoolOwner) -> None:
    sender, link = await map_pool(owner)
    (page,) = random_pages(1, SMALL)
    before = owner.pages()
    for page_id, data in ((8, page), (-1, page), (0, page[:-1])):
        with pytest.raises(FailedPrecondition):
            sender.write(page_id, data)
    sender.close()
    link.close()
    assert owner.pages() == before


def test_shm_refuses_a_pool_that_is_not_as_large_as_it_says() -> None:
    descriptor = os.memfd_create("small")
    try:
        os.ftruncate(descriptor, SMALL)
        for pool_bytes in (2 * SMALL, SMALL + 1, 0):
            with pytest.raises(FailedPrecondition):
                ShmSender(descriptor, pool_bytes=pool_bytes, page_bytes=SMALL)
    finally:
        os.close(descriptor)


async def test_a_decode_worker_that_dies_is_noticed_on_the_shm_link_at_once() -> None:
    gone = asyncio.Event()
    with PoolOwner(num_pages=1, page_bytes=SMALL) as owner:
        sender, link = await map_pool(owner)
        link.watch(gone.set)
        await asyncio.sleep(0.05)
        assert not gone.is_set()
        owner.kill()
        await asyncio.wait_for(gone.wait(), 2)
        sender.close()
        link.close()


async def test_auto_takes_grpc_when_shm_is_not_offered_or_not_there_or_refused(owner: PoolOwner) -> None:
    assert await choose("auto", shm_socket="", pair_id="x") == ("grpc", None)
    assert await choose("auto", shm_socket="pdserve-nobody-listens", pair_id="x") == ("grpc", None)
    assert await choose("auto", shm_socket=owner.shm_socket, pair_id="not the pairing") == ("grpc", None)
    assert await choose("grpc", shm_socket=owner.shm_socket, pair_id=owner.pair_id) == ("grpc", None)


async def test_forced_shm_that_is_impossible_is_an_error_and_no_fall_back(owner: PoolOwner) -> None:
    with pytest.raises(FailedPrecondition, match="--transport shm is impossible"):
        await choose("shm", shm_socket="", pair_id="x")
    with pytest.raises(Unavailable, match="--transport shm found nobody"):
        await choose("shm", shm_socket="pdserve-nobody-listens", pair_id="x")
    with pytest.raises(Unavailable, match="hung up on this pairing"):
        await choose("shm", shm_socket=owner.shm_socket, pair_id="not the pairing")


async def test_a_descriptor_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.handoff.dial.HANDSHAKE_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0pdserve-silent")
        listener.listen()
        assert await choose("auto", shm_socket="pdserve-silent", pair_id="x") == ("grpc", None)


async def test_a_pool_of_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch, owner: PoolOwner) -> None:
    monkeypatch.setattr("common.handoff.dial.os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(FailedPrecondition, match="runs as user"):
        await choose("shm", shm_socket=owner.shm_socket, pair_id=owner.pair_id)


async def test_a_link_leaves_no_descriptor_behind(owner: PoolOwner) -> None:
    before = open_descriptors()
    for _ in range(3):
        sender, link = await map_pool(owner)
        sender.close()
        link.close()
        await choose("auto", shm_socket=owner.shm_socket, pair_id="not the pairing")
    assert open_descriptors() == before


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("page_bytes", [SMALL, LARGE])
async def test_grpc_pushes_pages_of_any_size_bit_exact_into_another_process(page_bytes: int, verify: bool) -> None:
    ours = random_pages(5, page_bytes)
    with PoolOwner(num_pages=6, page_bytes=page_bytes) as owner:
        async with make_channel(owner.grpc_address) as channel:
            sender = make_sender(channel, ticket="4,0,2", pages=ours, page_count=3, verify=verify)
            pushing = asyncio.create_task(sender.run())
            sender.put(1, 4)
            await asyncio.sleep(0.01)
            sender.put(0, 1)
            sender.put(2, 3)
            sent = await asyncio.wait_for(pushing, 10)
        zero = bytes(page_bytes)
        assert owner.pages() == [bytes(ours[4]), zero, bytes(ours[3]), zero, bytes(ours[1]), zero]
    expected = tuple(zlib.crc32(ours[i]) for i in (1, 4, 3)) if verify else ()
    assert sent == (3, expected)


async def test_a_ticket_without_pages_needs_no_stream_HND_04() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        sender = make_sender(channel, ticket="t", pages=[], page_count=0)
        assert await sender.run() == (0, ())


class FaultyReceiver(handoff_pb2_grpc.HandoffServiceServicer):
    """Push does what the test says; ended: how many streams are over."""

    def __init__(self, behave: Any) -> None:
        self.frames: list[handoff_pb2.KvFrame] = []
        self.ended = 0
        self._behave = behave

    async def Push(self, frames: AsyncIterator[handoff_pb2.KvFrame], context: Any) -> handoff_pb2.PushResponse:
        try:
            return handoff_pb2.PushResponse(bytes_received=await self._behave(self, frames, context))
        finally:
            self.ended += 1


@asynccontextmanager
async def receiver(behave: Any) -> AsyncIterator[tuple[FaultyReceiver, grpc.aio.Channel]]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8 << 20)])
    faulty = FaultyReceiver(behave)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(faulty, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        yield faulty, channel
    await server.stop(None)


def make_sender(channel: grpc.aio.Channel, *, pages: list[memoryview], **kwargs: Any) -> GrpcSender:
    stub = handoff_pb2_grpc.HandoffServiceStub(channel)
    settings: dict[str, Any] = {"ticket": "t", "stall_timeout": timedelta(seconds=30)} | kwargs
    return GrpcSender(stub, read_page=pages.__getitem__, **settings)


async def refuses_second_frame(self: FaultyReceiver, frames: AsyncIterator[Any], context: Any) -> int:
    self.frames.append(await anext(frames))
    await context.abort(grpc.StatusCode.DATA_LOSS, "frame 1 is damaged")
    return 0


async def swallows(self: FaultyReceiver, frames: AsyncIterator[Any], context: Any) -> int:
    self.frames.append(await anext(frames))
    await asyncio.sleep(60)
    return 0


async def counts_wrong(self: FaultyReceiver, frames: AsyncIterator[Any], context: Any) -> int:
    async for frame in frames:
        self.frames.append(frame)
    return 1


async def ends_early(self: FaultyReceiver, frames: AsyncIterator[Any], context: Any) -> int:
    self.frames.append(await anext(frames))
    return 0


@pytest.mark.parametrize("more_pages", [True, False])
async def test_a_receivers_refusal_is_the_senders_error_at_once_also_while_it_has_nothing_to_send(more_pages: bool) -> None:
    async with receiver(refuses_second_frame) as (_, channel):
        sender = make_sender(channel, pages=random_pages(2, SMALL), page_count=2, stall_timeout=timedelta(seconds=60))
        sender.put(0, 0)
        if more_pages:
            sender.put(1, 1)
        with pytest.raises(DataLoss, match="frame 1 is damaged"):
            await asyncio.wait_for(sender.run(), 2)


@pytest.mark.parametrize("page_bytes", [SMALL, 8 * FRAME_BYTES])
async def test_a_transfer_that_starts_and_never_ends_is_given_up_HND_07(page_bytes: int) -> None:
    async with receiver(swallows) as (faulty, channel):
        sender = make_sender(channel, pages=random_pages(4, page_bytes), page_count=4, stall_timeout=QUICK)
        for page in range(4):
            sender.put(page, page)
        with pytest.raises(Unavailable, match="transfer timeout of 0.3 s"):
            await asyncio.wait_for(sender.run(), 5)
        await eventually(lambda: faulty.ended == 1, within=2)


async def test_a_receiver_that_stored_other_than_what_was_sent_is_an_error() -> None:
    async with receiver(counts_wrong) as (_, channel):
        sender = make_sender(channel, pages=random_pages(1, SMALL), page_count=1)
        sender.put(0, 0)
        with pytest.raises(PdserveError, match=f"stored 1 of {SMALL} KV bytes"):
            await sender.run()


async def test_a_receiver_that_ends_early_with_ok_is_an_error() -> None:
    async with receiver(ends_early) as (_, channel):
        sender = make_sender(channel, pages=random_pages(2, SMALL), page_count=2)
        sender.put(0, 0)
        with pytest.raises(PdserveError, match="before all KV bytes"):
            await asyncio.wait_for(sender.run(), 2)


async def test_a_cancelled_sender_closes_its_stream_and_reads_no_page_any_more() -> None:
    async with receiver(counts_wrong) as (faulty, channel):
        reads: list[int] = []
        (page,) = random_pages(1, SMALL)

        def read(page_id: int) -> memoryview:
            reads.append(page_id)
            return page

        stub = handoff_pb2_grpc.HandoffServiceStub(channel)
        sender = GrpcSender(stub, ticket="t", page_count=2, read_page=read, stall_timeout=QUICK)
        sender.put(0, 7)
        pushing = asyncio.create_task(sender.run())
        await eventually(lambda: len(faulty.frames) == 1, within=2)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        sender.put(1, 8)
        await eventually(lambda: faulty.ended == 1, within=2)
        assert reads == [7]


async def test_a_pool_owner_that_cannot_be_reached_is_unavailable() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        sender = make_sender(channel, pages=random_pages(1, SMALL), page_count=1, stall_timeout=timedelta(seconds=5))
        sender.put(0, 0)
        with pytest.raises(Unavailable):
            await sender.run()


async def test_the_other_side_of_a_link_sees_its_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, SMALL)
    send_welcome(theirs, descriptor=descriptor, pool_bytes=SMALL)
    os.close(descriptor)
    received, size = receive_welcome(ours)
    link = ShmLink(ours, descriptor=received, pool_bytes=size)
    link.close()
    assert theirs.recv(1) == b""
    theirs.close()
