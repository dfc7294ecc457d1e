"""Where log lines go: to stderr, without ever waiting for whoever reads it.

A pipe whose reader has stopped (a paused terminal, a log shipper that hangs) would stop the process at its next line, in the
middle of everything. Lines that it does not take are dropped and counted instead, and the count is the first line afterwards.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from typing import Final, TextIO

PATIENCE_MS: Final = 50
"""For a line, of a reader that is only slow; once it has been too slow it gets none until it has read again."""
CHUNK_BYTES: Final = 4096
"""What a pipe that is ready takes for certain."""


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """To stderr, or to what stands in for it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lost = 0
        self._is_within_a_line = False
        self._fd: int | None = None
        try:
            self._fd = _never_blocking(stream.fileno())
        except io.UnsupportedOperation:  # No file.
            return
        self._ready = select.poll()
        self._ready.register(self._fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._fd is None:
            super().emit(record)
            return
        try:
            line = self.format(record)
            if self._lost:
                line = f"{self.format(_note(self._lost))}\n{line}"
            begin = "\n" if self._is_within_a_line else ""
            if self._write(self._fd, f"{begin}{line}\n".encode(errors="backslashreplace")):
                self._lost = 0
            else:
                self._lost += 1
        except OSError:  # The disk is full, or the reader gone: nobody is left to be told.
            self._lost += 1
        except Exception:
            self.handleError(record)

    def _write(self, fd: int, data: bytes) -> bool:
        """Whether all of it was written. What does not fit any more once it has begun is cut."""
        give_up = time.monotonic() + (0 if self._lost else PATIENCE_MS / 1000)
        written = 0
        try:
            while written < len(data):
                left_ms = max(0.0, give_up - time.monotonic()) * 1000
                if not self._ready.poll(left_ms):
                    return False
                try:
                    written += os.write(fd, data[written : written + CHUNK_BYTES])
                except BlockingIOError:  # Ready for less than there is, as some files say it.
                    if not left_ms:
                        return False
                    time.sleep(0.001)
        finally:
            if written:
                self._is_within_a_line = written < len(data)
        return True


def _never_blocking(fd: int) -> int:
    """For a terminal, which says that it is ready and blocks nevertheless: another way to it, so that others who write to it keep
    theirs."""
    if os.isatty(fd):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return fd


def _note(lost: int) -> logging.LogRecord:
    text = "%d log lines were lost: stderr did not take them"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lost,), None)


def hold_standard_streams() -> None:
    """Files 0, 1 and 2 are open afterwards, on the null device if they were closed: else the next socket would be one of them,
    and what is written to stderr would go to a client."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest number that is free.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
