"""FakeDecode: a decode worker's services over real gRPC, as misbehaved as a test wants; written from the protos alone.

It grants pages in order from a pool of its own, takes KV by grpc and by shm, and knows of every ticket what became of it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.handoff.base import page_range, pages_to_send, send_welcome
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2, handoff_pb2_grpc
from common.wire import ids_from_bytes

Hook = Callable[[Any, Any], Awaitable[None]]


async def _nothing(request: Any, context: Any) -> None:
    """The hook of a call that behaves."""


@dataclass
class FakeTicket:
    """How a reservation fares. state: reserved, committed or released."""

    name: str
    request: decode_pb2.ReserveRequest
    page_ids: list[int]
    prefix_len: int
    state: str = "reserved"
    drained: bool = False
    bytes_received: int = 0
    push_open: bool = False
    renewals: int = 0
    commits: list[decode_pb2.CommitRequest] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return list(ids_from_bytes(self.request.req.input_ids))


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer, handoff_pb2_grpc.HandoffServiceServicer):
    """before: hooks by method name, run before the call is acted on; after: run before it is answered. A hook may wait, or abort
    the call through its context. prefix_len: tokens of every prompt it says to hold already."""

    def __init__(self, *, page_size: int = 4, pool_pages: int = 256, lease_ms: int = 10_000, offer_shm: bool = True) -> None:
        self.page_size, self.pool_pages, self.lease_ms, self.offer_shm = page_size, pool_pages, lease_ms, offer_shm
        self.page_bytes = 2 * page_size * 4  # FakeRunner's: K and V of one layer, one head, one float.
        self._fd = os.memfd_create("fake-decode", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, pool_pages * self.page_bytes)
        self.pool = memoryview(mmap.mmap(self._fd, pool_pages * self.page_bytes))
        self.worker_id = ""
        self.address = "127.0.0.1:0"
        self.pairs: dict[str, decode_pb2.PairRequest] = {}
        self.connections: dict[str, socket.socket] = {}
        self.tickets: dict[str, FakeTicket] = {}
        self.before: dict[str, Hook] = {}
        self.after: dict[str, Hook] = {}
        self.calls: list[str] = []
        self.prefix_len = 0
        self._next_page = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def ticket(self) -> FakeTicket:
        """The only one there was."""
        (ticket,) = self.tickets.values()
        return ticket

    async def start(self) -> None:
        """At its former address, if it has one, with a new id and knowing nobody."""
        self.worker_id = f"decode-{secrets.token_hex(4)}"
        self.pairs.clear()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(b"\0" + self.worker_id.encode())
        self._listener.listen()
        self._accepting = asyncio.create_task(self._accept(self._listener))
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """As if it died: every connection breaks."""
        assert self._server is not None and self._listener is not None and self._accepting is not None
        self._accepting.cancel()
        self._listener.close()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        await self._server.stop(None)

    def kv_of(self, ticket: FakeTicket) -> list[tuple[float, float]]:
        """(K, V) of each prompt token from prefix_len on, as the pool has them."""
        found: list[tuple[float, float]] = []
        for page_id in ticket.page_ids:
            data = self.pool[page_range(page_id, self.page_bytes)]
            values = struct.unpack(f"{2 * self.page_size}f", data)
            found += zip(values[: self.page_size], values[self.page_size :], strict=True)
        return found[: len(ticket.ids) - ticket.prefix_len]

    def assert_all_kv_arrived(self, ticket: FakeTicket) -> None:
        """Every token's K and V are FakeRunner's."""
        wanted = [(token + 1, position + 1) for position, token in enumerate(ticket.ids)][ticket.prefix_len :]
        assert self.kv_of(ticket) == wanted

    async def Pair(self, request: decode_pb2.PairRequest, context: Any) -> decode_pb2.PairResponse:
        await self._begin("Pair", request, context)
        pair_id = secrets.token_hex(8)
        self.pairs[pair_id] = request
        response = decode_pb2.PairResponse(
            decode_worker=self.worker_id,
            pair_id=pair_id,
            shm_socket=self.worker_id if self.offer_shm else "",
            page_bytes=self.page_bytes,
            pool_pages=self.pool_pages,
        )
        await self.after.get("Pair", _nothing)(request, context)
        return response

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        await self._begin("Reserve", request, context)
        if request.pair_id not in self.pairs:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "unknown pairing: pair again")
        assert request.transport == "grpc" or request.pair_id in self.connections
        ids = ids_from_bytes(request.req.input_ids)
        count = pages_to_send(input_len=len(ids), prefix_len=self.prefix_len, page_size=self.page_size)
        pages = [(self._next_page + i) % self.pool_pages for i in range(count)][::-1]
        self._next_page += count
        ticket = FakeTicket(secrets.token_hex(4), request, pages, self.prefix_len)
        self.tickets[ticket.name] = ticket
        await self.after.get("Reserve", _nothing)(request, context)
        return decode_pb2.ReserveResponse(ticket=ticket.name, page_ids=pages, prefix_len=self.prefix_len, lease_ms=self.lease_ms)

    async def Renew(self, request: decode_pb2.RenewRequest, context: Any) -> decode_pb2.RenewResponse:
        await self._begin("Renew", request, context)
        lost = [name for name in request.tickets if name not in self.tickets or self.tickets[name].state != "reserved"]
        for name in set(request.tickets) - set(lost):
            self.tickets[name].renewals += 1
        return decode_pb2.RenewResponse(lost=lost)

    async def Commit(self, request: decode_pb2.CommitRequest, context: Any) -> decode_pb2.CommitResponse:
        ticket = self.tickets.get(request.ticket)
        if ticket is not None:
            ticket.commits.append(request)
        await self._begin("Commit", request, context)
        if ticket is None or ticket.state == "released":
            await context.abort(grpc.StatusCode.ABORTED, "the ticket has ended")
            raise AssertionError
        if ticket.request.transport == "grpc" and ticket.bytes_received != len(ticket.page_ids) * self.page_bytes:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "bytes are missing")
        ticket.state = "committed"
        await self.after.get("Commit", _nothing)(request, context)
        return decode_pb2.CommitResponse()

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Any) -> decode_pb2.ReleaseResponse:
        await self._begin("Release", request, context)
        if (ticket := self.tickets.get(request.ticket)) is not None and ticket.state == "reserved":
            ticket.state, ticket.drained = "released", request.drained
        return decode_pb2.ReleaseResponse()

    async def Push(self, frames: AsyncIterator[handoff_pb2.KvFrame], context: Any) -> handoff_pb2.PushResponse:
        received, ticket = 0, None
        try:
            async for frame in frames:
                ticket = self.tickets[frame.ticket]
                ticket.push_open = True
                await self._begin("Push", frame, context)
                assert zlib.crc32(frame.data) == frame.crc32
                page = self.pool[page_range(ticket.page_ids[frame.page_index], self.page_bytes)]
                page[frame.offset : frame.offset + len(frame.data)] = frame.data
                received += len(frame.data)
                ticket.bytes_received = received
            await self.after.get("Push", _nothing)(None, context)
        finally:
            if ticket is not None:
                ticket.push_open = False
        return handoff_pb2.PushResponse(bytes_received=received)

    async def _begin(self, method: str, request: Any, context: Any) -> None:
        self.calls.append(method)
        await self.before.get(method, _nothing)(request, context)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            pair_id = (await loop.sock_recv(connection, 200)).decode().strip()
            if pair_id in self.pairs:
                send_welcome(connection, descriptor=self._fd, pool_bytes=len(self.pool))
                self.connections[pair_id] = connection
            else:
                connection.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side of a connection has hung up."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def aborts(code: grpc.StatusCode, text: str = "no", *, times: int = 10**9) -> Hook:
    """A hook that ends the first `times` calls with this status."""
    left = times

    async def hook(request: Any, context: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            await context.abort(code, text)

    return hook


def waits(event: asyncio.Event) -> Hook:
    """A hook that holds every call up until then."""

    async def hook(request: Any, context: Any) -> None:
        await event.wait()

    return hook
