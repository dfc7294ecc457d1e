"""HandoffService over a GrpcReceiver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.handoff.grpc_receiver import Frame
from common.logs import bind
from common.rpc.gen.pdserve.v1 import handoff_pb2, handoff_pb2_grpc
from decode_worker.worker import DecodeWorker


class HandoffServicer(handoff_pb2_grpc.HandoffServiceServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Push(
        self, request_iterator: AsyncIterator[handoff_pb2.KvFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> handoff_pb2.PushResponse:
        received = await self._worker.ready.receiver.receive(self._frames(request_iterator))
        return handoff_pb2.PushResponse(bytes_received=received)

    async def _frames(self, requests: AsyncIterator[handoff_pb2.KvFrame]) -> AsyncIterator[Frame]:
        is_first = True
        async for pb in requests:
            if is_first:
                bind(self._worker.names.of(pb.ticket))
                is_first = False
            yield Frame(pb.ticket, pb.page_index, pb.offset, pb.data, pb.crc32)
