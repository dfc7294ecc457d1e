"""Log lines and a stderr that does not take them."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from common.log_output import StderrHandler

LINE = "x" * 900
ROOT = Path(__file__).resolve().parents[2]


class Pipe:
    """As stderr: takes a page, and what is read."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        self.writer: TextIO = os.fdopen(writer, "w")

    def read(self) -> list[str]:
        return os.read(self.reader, 1 << 16).decode().split("\n")


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.writer.close()
    os.close(made.reader)


def say(handler: StderrHandler, text: str) -> None:
    handler.handle(logging.LogRecord("x", logging.INFO, __file__, 0, text, (), None))


def test_a_reader_that_has_stopped_stops_nobody_and_is_told_what_it_missed(pipe: Pipe) -> None:
    handler = StderrHandler(pipe.writer)
    began = time.monotonic()
    for _ in range(1000):
        say(handler, LINE)
    assert time.monotonic() - began < 10, "patience was had once, not a thousand times"
    taken = pipe.read()
    assert set(taken[:-1]) == {LINE}
    say(handler, "again")
    first, *rest = pipe.read()
    assert first == f"{1000 - len(taken[:-1])} log lines were lost: stderr did not take them"
    assert rest == ["again", ""]


def test_a_line_that_only_begins_to_fit_is_cut_and_the_next_one_is_whole(pipe: Pipe) -> None:
    handler = StderrHandler(pipe.writer)
    say(handler, "y" * 20_000)
    assert pipe.read() == ["y" * 4096]
    say(handler, "again")
    assert pipe.read() == ["", "1 log lines were lost: stderr did not take them", "again", ""]


def test_a_reader_that_has_gone_and_a_full_disk_are_nobody_s_trouble() -> None:
    pipe = Pipe()
    os.close(pipe.reader)
    for stream in (pipe.writer, Path("/dev/full").open("w")):  # noqa: SIM115
        handler = StderrHandler(stream)
        say(handler, LINE)
        say(handler, LINE)
        stream.close()


def test_what_is_no_file_is_written_to_like_any_stream() -> None:
    stream = io.StringIO()
    say(StderrHandler(stream), "hello")
    assert stream.getvalue() == "hello\n"


def test_closed_standard_streams_are_not_the_next_sockets(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(
        "import logging, os, socket\n"
        "from common import logs\n"
        "logs.configure('x', 'info')\n"
        "logging.info('lost'); print('lost', flush=True)\n"
        "os._exit(socket.socket().fileno())\n"
    )
    line = f"exec '{sys.executable}' '{script}' <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=30)
    assert done.returncode >= 3, "the first socket is none of the three"


def test_a_terminal_that_nobody_reads_stops_nobody() -> None:
    """One says that it is ready, and blocks in the middle of what it is given."""
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w") as terminal:
            handler = StderrHandler(terminal)
            began = time.monotonic()
            for _ in range(100):
                say(handler, LINE)
            assert time.monotonic() - began < 20
            termios.tcflush(terminal, termios.TCIOFLUSH)
    finally:
        os.close(master)
