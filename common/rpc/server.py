"""A gRPC server as every process here runs it."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any, Final

import grpc

from common.address import Address
from common.errors import StartError
from common.rpc.interceptors import ErrorInterceptor

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

# Beyond it a call is refused at once. 2,000 calls in one burst came back CANCELLED with gRPC's own limit.
_MAX_PENDING_CALLS = 100_000


def make_server(*, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Server:
    """Not yet listening: add services, bind(), then start()."""
    return grpc.aio.server(
        interceptors=(ErrorInterceptor(),),
        options=(
            # A taken port is an error, not a second listener that gets half of the calls (GRP-04).
            ("grpc.so_reuseport", 0),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
            # Clients may ping as often as they like, also while a prompt is silently being computed (GRP-01).
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # And a client that vanished without a word is noticed.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ),
    )


async def bind(server: grpc.aio.Server, address: Address) -> Address:
    """Makes server listen on address; returns it with port 0 resolved. Raises StartError saying why it cannot."""
    await check_free(address)
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address}: {error}") from error
    return address.with_port(port)


async def check_free(address: Address) -> None:
    """Raises StartError if address cannot be listened on. gRPC names no reason, and takes a name of which only
    one address is free: so each address is tried with a plain socket."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise StartError(f"cannot listen on {address}: {(error.strerror or str(error)).lower()}") from error
    failures = [failure for family, _, _, _, where in found if (failure := _try_bind(family, where)) is not None]
    for failure in failures:
        if failure.errno == errno.EADDRINUSE or len(failures) == len(found):
            raise StartError(f"cannot listen on {address}: {(failure.strerror or str(failure)).lower()}") from failure


def _try_bind(family: int, where: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        return error
    return None
