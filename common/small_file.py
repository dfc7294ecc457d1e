"""Reading what an operator names: a file, or a pipe (`--auth-token-file <(vault read ...)`), and never more than is sensible."""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 8 << 20
START_SECONDS: Final = 5.0
"""How long whoever writes to a pipe may take while a process starts."""


def read_small(path: Path, *, patience_seconds: float = 0.0) -> bytes:
    """All of it. Raises OSError, a TimeoutError if it is a pipe and its end does not come in time; ValueError, to follow the
    file's name, if it has more than MAX_BYTES."""
    give_up = time.monotonic() + patience_seconds
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        read = bytearray()
        while ready.poll(max(0.0, give_up - time.monotonic()) * 1000):
            with contextlib.suppress(BlockingIOError):
                if not (chunk := os.read(fd, MAX_BYTES + 1 - len(read))):
                    return bytes(read)
                read += chunk
            if len(read) > MAX_BYTES:
                raise ValueError(f"must have at most {MAX_BYTES} bytes")
        raise TimeoutError(f"it is a pipe whose writer has not ended within {patience_seconds:g} s")
    finally:
        os.close(fd)
