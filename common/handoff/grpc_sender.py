"""GrpcSender: pushes one ticket's pages over one HandoffService.Push stream while they are still being computed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import grpc

from common.errors import PdserveError, Unavailable
from common.handoff.base import FRAME_BYTES, page_checksum
from common.handoff.page_sender import Sent
from common.rpc.channels import error_of
from common.rpc.gen.pdserve.v1 import handoff_pb2, handoff_pb2_grpc


class GrpcSender:
    """put() pages as they get ready; run() sends them, in a task of its own.

    Only run() reads pages: once its task has ended, by result, error or cancellation, no page is read any more and the stream is
    closed. One frame at a time is in flight beyond what flow control has taken.
    """

    def __init__(
        self,
        stub: handoff_pb2_grpc.HandoffServiceStub,
        *,
        ticket: str,
        page_count: int,
        read_page: Callable[[int], memoryview],
        stall_timeout: timedelta,
        verify: bool = False,
        on_sent: Callable[[int], None] = lambda page_id: None,
    ) -> None:
        """page_count: pages of the whole ticket. read_page: the bytes of one of our pages, by id. on_sent(page_id): it is
        not read any more.
        stall_timeout: longest wait for the receiver to take one frame, and for its answer at the end."""
        self._stub = stub
        self._ticket = ticket
        self._page_count = page_count
        self._read_page = read_page
        self._stall_timeout = stall_timeout
        self._verify = verify
        self._on_sent = on_sent
        self._ready: deque[tuple[int, int]] = deque()
        self._wake = asyncio.Event()
        self._page_crc32 = [0] * page_count
        self._bytes_sent = 0

    def put(self, page_index: int, page_id: int) -> None:
        """This page of ours is complete and belongs at page_index of the ticket; it stays as it is until run() has ended."""
        self._ready.append((page_index, page_id))
        self._wake.set()

    async def run(self) -> Sent:
        """Sends until every page of the ticket was put, sent and acknowledged. Raises the receiver's error, or Unavailable when
        it takes nothing for stall_timeout."""
        if self._page_count == 0:
            return Sent(0, ())
        call = self._stub.Push()
        call.add_done_callback(lambda _: self._wake.set())
        try:
            await self._push_all(call)
            return Sent(self._page_count, tuple(self._page_crc32) if self._verify else ())
        except TimeoutError:
            seconds = self._stall_timeout.total_seconds()
            raise Unavailable(f"the decode worker took no KV bytes for the transfer timeout of {seconds:g} s") from None
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):  # done_writing() raises the second.
            raise await _error_of_call(call) from None
        finally:
            call.cancel()

    async def _push_all(self, call: Any) -> None:
        sent = 0
        while sent < self._page_count:
            page_index, page_id = await self._next(call)
            for frame in self._frames(page_index, self._read_page(page_id)):
                async with asyncio.timeout(self._stall_timeout.total_seconds()):
                    await call.write(frame)
            self._on_sent(page_id)
            sent += 1
        async with asyncio.timeout(self._stall_timeout.total_seconds()):
            await call.done_writing()
            response = await call
        if response.bytes_received != self._bytes_sent:
            raise PdserveError(f"the decode worker stored {response.bytes_received} of {self._bytes_sent} KV bytes")

    async def _next(self, call: Any) -> tuple[int, int]:
        """The next page to send; raises the call's error as soon as the receiver ends it, also while there is nothing to send."""
        while not self._ready:
            if call.done():
                raise asyncio.InvalidStateError("the receiver ended the stream")
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()

    def _frames(self, page_index: int, page: memoryview) -> Iterator[handoff_pb2.KvFrame]:
        data = page.cast("B")
        for offset in range(0, len(data), FRAME_BYTES):
            part = data[offset : offset + FRAME_BYTES]
            self._bytes_sent += len(part)
            yield handoff_pb2.KvFrame(
                ticket=self._ticket, page_index=page_index, offset=offset, data=bytes(part), crc32=page_checksum(part)
            )
        if self._verify:
            self._page_crc32[page_index] = page_checksum(data)


async def _error_of_call(call: Any) -> PdserveError:
    """Why a call has ended; a receiver that ends it with OK before all bytes came is wrong too."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    return PdserveError("the decode worker ended the transfer before all KV bytes were sent")
