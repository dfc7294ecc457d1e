"""Channels to peers, and a peer's status as an error of ours."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from common.address import Address
from common.errors import PdserveError, Unavailable, from_status
from common.rpc.server import MAX_MESSAGE_BYTES

Connect = Callable[[Address | str], grpc.aio.Channel]
"""A channel to an address, to be closed by the caller: make_channel, or Security.connect."""

_LOST_STATUS = "Internal error from Core"


def make_channel(
    address: Address | str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    tls: grpc.ChannelCredentials | None = None,
    peer_name: str = "",
) -> grpc.aio.Channel:
    """A connection of its own to address, made on first use and again when lost. The caller closes it.

    tls: None: in clear. peer_name: what the peer's certificate must carry; empty: the host in address."""
    options = _options(max_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(str(address), options=options)
    if peer_name:
        options = (*options, ("grpc.ssl_target_name_override", peer_name))
    return grpc.aio.secure_channel(str(address), tls, options=options)


def _options(max_message_bytes: int) -> tuple[tuple[str, int | str], ...]:
    return (
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Channels share no connection: bulk frames do not queue in front of tokens, and a successor inherits no back-off.
        ("grpc.use_local_subchannel_pool", 1),
        # Peers are named by address on purpose; a proxy from the environment would only get in between.
        ("grpc.enable_http_proxy", 0),
        # A peer that vanished without a word is noticed within 15 s, a silent but living one is kept.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted peer is found again within 2 s. The minimum is also how long one attempt to connect may take.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    )


def error_of(error: grpc.aio.AioRpcError) -> PdserveError:
    """The same status and text as an error of our family.

    A write that meets the end of its stream replaces the peer's status by an INTERNAL of the library's own (grpc/grpc#36066);
    that one becomes Unavailable, which is all that is known then.
    """
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
        return Unavailable("the peer ended the stream while it was being written to")
    return from_status(error.code(), error.details() or "")
