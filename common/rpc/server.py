"""A gRPC server as every process here runs it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import grpc

from common.address import Address, UnixAddress
from common.errors import StartError
from common.rpc.compression import SERVER_OPTIONS
from common.rpc.interceptors import ErrorInterceptor
from common.rpc.messages import MessageInterceptor

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
MAX_METADATA_BYTES: Final = 16 * 1024

# Beyond it a call is refused at once. 2,000 calls in one burst came back CANCELLED with gRPC's own limit.
_MAX_PENDING_CALLS = 100_000


CLIENT_SILENCE: Final = timedelta(seconds=30)
"""How long a client may be silent, pings included, before its connection and with it its calls are given up."""
ROUTER_SILENCE: Final = timedelta(seconds=6)
"""The same at workers, whose clients are routers and other workers: what a vanished one had under way is freed then."""


def make_server(
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_metadata_bytes: int = MAX_METADATA_BYTES,
    silence: timedelta = CLIENT_SILENCE,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Not yet listening: add services, bind(), then start(). silence: see CLIENT_SILENCE. interceptors: around the handlers;
    their errors become statuses."""
    patience_ms = silence // timedelta(milliseconds=2)
    return grpc.aio.server(
        interceptors=(
            ErrorInterceptor(max_message_bytes=max_message_bytes),
            *interceptors,
            MessageInterceptor(max_message_bytes=max_message_bytes),
        ),
        options=(
            *SERVER_OPTIONS,
            # A taken port is an error, not a second listener that gets half of the calls (GRP-04).
            ("grpc.so_reuseport", 0),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            # Both limits the same: between them gRPC would refuse some calls and not others.
            ("grpc.max_metadata_size", max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", max_metadata_bytes),
            ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
            # Clients may ping as often as they like, also while a prompt is silently being computed (GRP-01).
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # And a client that vanished without a word is noticed.
            ("grpc.keepalive_time_ms", patience_ms),
            ("grpc.keepalive_timeout_ms", patience_ms),
            ("grpc.http2.ping_timeout_ms", patience_ms),
        ),
    )


async def bind(server: grpc.aio.Server, address: Address, *, credentials: grpc.ServerCredentials | None = None) -> Address:
    """Makes server listen on address, with TLS if there are credentials; returns it with port 0 resolved. Raises StartError
    saying why it cannot."""
    await check_free(address)
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        await check_free(address)  # It may have been taken since: gRPC says the same of that and of a key it does not take.
        reason = str(error) if credentials is None else "gRPC does not take the certificate or its key"
        raise StartError(f"cannot listen on {address}: {reason}") from error
    return address.with_port(port)


async def check_free(address: Address) -> None:
    """Raises StartError if address cannot be listened on. gRPC names no reason, and takes a name of which only
    one address is free: so each address is tried with a plain socket."""
    if isinstance(address, UnixAddress):
        _check_path_free(address)
        return
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise StartError(f"cannot listen on {address}: {(error.strerror or str(error)).lower()}") from error
    failures = [failure for family, _, _, _, where in found if (failure := _try_bind(family, where)) is not None]
    for failure in failures:
        if failure.errno == errno.EADDRINUSE or len(failures) == len(found):
            raise StartError(f"cannot listen on {address}: {(failure.strerror or str(failure)).lower()}") from failure


def _check_path_free(address: UnixAddress) -> None:
    """gRPC would take over the path of a server that lives, and of a file that is no socket."""
    path = Path(address.host)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.host)
        reason = "address already in use"
    except FileNotFoundError:
        writable = os.access(path.parent, os.W_OK | os.X_OK)
        reason = "" if writable else "permission denied" if path.parent.is_dir() else f"{path.parent} is no folder"
    except ConnectionRefusedError:
        reason = "" if path.is_socket() else "something that is no socket is there"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason:
        raise StartError(f"cannot listen on {address}: {reason}")


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
