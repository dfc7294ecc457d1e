"""Channels to peers, and a peer's status as an error of ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Final, Protocol

import grpc

from common.address import Address
from common.errors import LEAVING_METADATA, Leaving, PdserveError, Unavailable, from_status
from common.rpc.compression import CHANNEL_OPTIONS
from common.rpc.server import MAX_MESSAGE_BYTES

PEER_SILENCE: Final = timedelta(seconds=1.7)
"""How long a peer may leave a ping unanswered and say nothing else, by default, before its connection is given up. Pings are
answered by threads of gRPC's own: a peer that computes, collects garbage or holds its interpreter answers too; one that is
stopped or cut off does not."""
SHORTEST_SILENCE: Final = timedelta(seconds=1.3)

_PING_PAUSE = timedelta(seconds=1)
"""gRPC sends no two pings sooner after each other."""
_LOST_STATUS = "Internal error from Core"
_NOT_CONNECTED = "failed to connect to all addresses"
_MEANINGS = {
    "Socket closed": "it hangs up on callers like this one: does it want TLS, or another certificate?",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of an authority that is trusted here, see --tls-ca",
    "Hostname Verification Check failed": "its certificate is for another name than it was called by, see --tls-peer-name",
}
_SILENT = ("ping timeout", "Connection timed out", "User timeout")
"""In what gRPC says of a connection that it gave up because its other end said nothing."""


def make_channel(
    address: Address | str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    silence: timedelta = PEER_SILENCE,
    tls: grpc.ChannelCredentials | None = None,
    peer_name: str = "",
) -> grpc.aio.Channel:
    """A connection of its own to address, made on first use and again when lost. The caller closes it.

    silence: a peer that is silent for so long, at least SHORTEST_SILENCE, is taken for gone; calls to it end UNAVAILABLE.
    tls: None: in clear. peer_name: what the peer's certificate must carry; empty: the host in address."""
    options = _options(max_message_bytes, silence)
    if tls is None:
        return grpc.aio.insecure_channel(str(address), options=options)
    if peer_name:
        options = (*options, ("grpc.ssl_target_name_override", peer_name))
    return grpc.aio.secure_channel(str(address), tls, options=options)


class Connect(Protocol):
    """Makes a channel to an address, to be closed by the caller: make_channel, or Security.connect."""

    def __call__(self, address: Address | str, *, silence: timedelta = PEER_SILENCE) -> grpc.aio.Channel: ...


def _options(max_message_bytes: int, silence: timedelta) -> tuple[tuple[str, int | str], ...]:
    pause = max(_PING_PAUSE, silence / 2)
    patience_ms = max(300, (silence - pause) // timedelta(milliseconds=1))
    return (
        *CHANNEL_OPTIONS,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Channels share no connection: bulk frames do not queue in front of tokens, and a successor inherits no back-off.
        ("grpc.use_local_subchannel_pool", 1),
        # Peers are named by address on purpose; a proxy from the environment would only get in between.
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", pause // timedelta(milliseconds=1)),
        # The first is how long the kernel waits for the bytes to be taken, the second gRPC for the answer (else a minute).
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted peer is found again within 2 s. The minimum is also how long one attempt to connect may take.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    )


def check_silence(silence: timedelta) -> None:
    """Of --peer-silence. Raises ValueError."""
    if silence < SHORTEST_SILENCE:
        shortest = SHORTEST_SILENCE.total_seconds()
        raise ValueError(f"--peer-silence must be at least {shortest:g}s, for pings go out every second, got {silence}")


def error_of(error: grpc.aio.AioRpcError) -> PdserveError:
    """The same status and text as an error of our family.

    A write that meets the end of its stream replaces the peer's status by an INTERNAL of the library's own (grpc/grpc#36066);
    that one becomes Unavailable, which is all that is known then. So does CANCELLED, which is no wish of ours (a call that we
    cancel raises CancelledError here): a server that stops says it of calls that no handler has seen yet (grpc/grpc#41785).
    """
    if LEAVING_METADATA in tuple(error.trailing_metadata() or ()):
        return Leaving(error.details() or "")
    if is_silence(error):
        return Unavailable("it is silent: a ping was not answered in time")
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
        return Unavailable("the peer ended the stream while it was being written to")
    if error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable("the peer gave up the call")
    return from_status(error.code(), explained(error.details() or ""))


def explained(details: str) -> str:
    """What gRPC says of a connection that it could not make, and in words what that mostly means."""
    if not details.startswith(_NOT_CONNECTED):
        return details
    return details + next((f" ({meaning})" for sign, meaning in _MEANINGS.items() if sign in details), "")


def is_silence(error: grpc.aio.AioRpcError) -> bool:
    """The connection was given up because the peer said nothing: it is stopped, cut off or gone, and asking again is no use."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _SILENT)
