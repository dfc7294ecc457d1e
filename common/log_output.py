"""Where lines go: to stderr, or stdout, without ever waiting for whoever reads it.

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


class LineOutput:
    """A file that lines are written to without waiting for whoever reads them, and without a word of what goes wrong: a full
    disk, a reader that has gone."""

    def __init__(self, fd: int) -> None:
        self.lost = 0
        """Lines since the last one that was taken."""
        self._is_within_a_line = False
        self._fd = _never_blocking(fd)
        self._ready = select.poll()
        self._ready.register(self._fd, select.POLLOUT)

    def write(self, lines: str) -> None:
        """What does not fit any more once it has begun is cut."""
        begin = "\n" if self._is_within_a_line else ""
        try:
            is_taken = self._write(f"{begin}{lines}\n".encode(errors="backslashreplace"))
        except OSError:
            is_taken = False
        self.lost = 0 if is_taken else self.lost + 1

    def _write(self, data: bytes) -> bool:
        """Whether all of it was written."""
        give_up = time.monotonic() + (0 if self.lost else PATIENCE_MS / 1000)
        written = 0
        try:
            while written < len(data):
                left_ms = max(0.0, give_up - time.monotonic()) * 1000
                if not self._ready.poll(left_ms):
                    return False
                try:
                    written += os.write(self._fd, data[written : written + CHUNK_BYTES])
                except BlockingIOError:  # Ready for less than there is, as some files say it.
                    if not left_ms:
                        return False
                    time.sleep(0.001)
        finally:
            if written:
                self._is_within_a_line = written < len(data)
        return True


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """To stderr, or to what stands in for it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._output: LineOutput | None = None
        with contextlib.suppress(io.UnsupportedOperation):  # It may be no file.
            self._output = LineOutput(stream.fileno())

    def emit(self, record: logging.LogRecord) -> None:
        if self._output is None:
            super().emit(record)
            return
        try:
            line = self.format(record)
            if self._output.lost:
                line = f"{self.format(_note(self._output.lost))}\n{line}"
            self._output.write(line)
        except Exception:
            self.handleError(record)


def tell(line: str) -> None:
    """On standard output, for whoever waits for it there, if anybody does."""
    LineOutput(1).write(line)


def complain(why: str) -> None:
    """On stderr, as the last words of a program that cannot go on."""
    LineOutput(2).write(f"error: {why}")


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
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
