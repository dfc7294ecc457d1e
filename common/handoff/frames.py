"""Frames on the cuda_ipc socket: a length, 4 bytes little-endian, then so many bytes. Length 0 is the sender's goodbye."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

MAX_FRAME_BYTES: Final = 1 << 20
"""More than any CommitRequest needs: checksums of 100,000 pages, or 1,000 completions with 20 logprobs each."""
GOODBYE: Final = struct.pack("<I", 0)

_LENGTH: Final = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """Raises ValueError if data is empty or larger than a frame may be."""
    if not 0 < len(data) <= MAX_FRAME_BYTES:
        raise ValueError(f"a frame must have 1 to {MAX_FRAME_BYTES} bytes, got {len(data)}")
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Cuts a stream into frames, however it arrives. said_goodbye: nothing that follows counts."""

    def __init__(self) -> None:
        self.said_goodbye = False
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete now. Raises ValueError on a length that no frame has."""
        self._received += data
        while not self.said_goodbye and len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got a length of {length}")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            if content:
                yield content
            else:
                self.said_goodbye = True
