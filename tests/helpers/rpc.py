"""A generic service for tests of servers and channels: handlers are plain functions, messages plain bytes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.address import Address
from common.rpc.channels import make_channel
from common.rpc.server import MAX_MESSAGE_BYTES, bind, make_server

SERVICE = "test.Service"
LOOPBACK = Address("127.0.0.1", 0)
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def add_handlers(server: grpc.aio.Server, handlers: Mapping[str, Callable[..., Any]]) -> None:
    """handlers: name -> behavior; the name begins with the kind: unary_stream_failing."""
    made = {name: getattr(grpc, f"{kind_of(name)}_rpc_method_handler")(behavior) for name, behavior in handlers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, made),))


def kind_of(name: str) -> str:
    return next(kind for kind in KINDS if name.startswith(kind))


@asynccontextmanager
async def serving(
    handlers: Mapping[str, Callable[..., Any]], *, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a started server with these handlers."""
    server = make_server(max_message_bytes=max_message_bytes)
    add_handlers(server, handlers)
    address = await bind(server, LOOPBACK)
    await server.start()
    try:
        # The client has no limit of its own here: what is tested is the server's.
        async with make_channel(address, max_message_bytes=-1) as channel:
            yield channel
    finally:
        await server.stop(0)


def method(channel: grpc.aio.Channel, name: str) -> Any:
    return getattr(channel, kind_of(name))(f"/{SERVICE}/{name}")


async def call(
    channel: grpc.aio.Channel, name: str, requests: Sequence[bytes] = (b"hello",), *, timeout: float = 5
) -> list[bytes]:
    """All responses of one call. Raises AioRpcError."""
    kind = kind_of(name)
    started = method(channel, name)(iter(requests) if kind.startswith("stream") else requests[0], timeout=timeout)
    if inspect.isawaitable(started):
        return [await started]
    return [response async for response in started]
