"""Requests that come compressed: by gzip, and never inflated beyond the limit on a message.

gRPC itself inflates a message whole before it looks at the limit, before its handler runs and whoever sends it: 200 kB that stand
for 200 MB took 200 MB of memory. So it is told to pass on what has come, and to refuse other ways to compress (UNIMPLEMENTED).
"""

from __future__ import annotations

import zlib
from typing import Final

from common.errors import InvalidArgument, ResourceExhausted

_IDENTITY, _GZIP = 1 << 0, 1 << 2
SERVER_OPTIONS: Final = (
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY | _GZIP),
)
CHANNEL_OPTIONS: Final = (("grpc.compression_enabled_algorithms_bitset", _IDENTITY),)
"""Our servers compress no answer."""

_MAGIC: Final = b"\x1f\x8b"
"""How gzip begins and no message of protobuf can: there is no wire type 7."""
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


def inflated(data: bytes, *, max_bytes: int) -> bytes:
    """The message, as it was before it was compressed, if it was. Raises ResourceExhausted naming the limit, InvalidArgument."""
    if not data.startswith(_MAGIC):
        return data
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        message = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidArgument(f"the message cannot be read: {error}") from None
    if len(message) > max_bytes:
        raise ResourceExhausted(f"a message must have at most {max_bytes} bytes (--max-message-mb), this one inflates to more")
    if not stream.eof or stream.unused_data:
        raise InvalidArgument("the message cannot be read: it must be one whole gzip stream")
    return message
