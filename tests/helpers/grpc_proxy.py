"""A gRPC proxy of the tests' own: forwards every call, of any method, and lets a test take messages out of single ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType
from typing import Any

import grpc

Meddle = Callable[[str, AsyncIterator[bytes]], AsyncIterator[bytes]]
"""What of a call's requests passes; (method, requests)."""


class GrpcProxy(grpc.GenericRpcHandler):
    """async with GrpcProxy("host:port", meddle) as proxy: proxy.address is reached like the target.

    On the wire every method is a stream each way, so one handler of raw messages serves all. Statuses, details, deadlines,
    cancellation and metadata pass.
    """

    def __init__(self, target: str, meddle: Meddle) -> None:
        self._target, self._meddle = target, meddle
        self.address = ""

    async def __aenter__(self) -> GrpcProxy:
        self._channel = grpc.aio.insecure_channel(self._target, options=[("grpc.max_receive_message_length", -1)])
        options = [("grpc.max_receive_message_length", -1), ("grpc.http2.max_ping_strikes", 0)]
        self._server = grpc.aio.server(handlers=[self], options=options)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self._server.stop(0)
        await self._channel.close(None)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, details.method))

    async def _forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        metadata = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(("grpc-", "user-agent"))]
        call: Any = self._channel.stream_stream(method)(
            self._meddle(method, requests),  # type: ignore[arg-type]  # raw bytes
            timeout=context.time_remaining(),
            metadata=metadata,
        )
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata()))
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()
