"""What an engine's own process does (python -m common.engine DESCRIPTOR PARENT); common/engine/process.py starts it.

It ends when it is told to (Close), when its core raises, and at once when its parent is gone, however that ended: the kernel
kills it (PR_SET_PDEATHSIG), and should that fail, its watcher sees the socket hang up. Signals that ask to stop are the parent's
business.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from common import logs
from common.descriptor import Descriptor
from common.engine.core_loop import CoreLoop
from common.engine.handle import Build, Urgent
from common.engine.inlet import Inlet, ToCommand
from common.engine.parcel import Unpacker, pack
from common.errors import PdserveError, StartError
from common.tied import die_with_parent

READ_BYTES: Final = 1 << 18
START_SECONDS: Final = 60.0
"""The first parcel was sent before this process began."""
READS_AT_ONCE: Final = 64
"""Then what has come is acted on, whatever else keeps coming."""
MAX_DESCRIPTORS: Final = 8
"""In one message; a parcel has one or two."""


@dataclass(frozen=True)
class Start:
    """The parent's first parcel. logging: what its logs are configured with."""

    build: Build
    logging: logs.Settings | None


@dataclass(frozen=True)
class Listen:
    """From now on an inlet's messages are commands, too (common/engine/inlet.py). connection: its socket."""

    connection: Descriptor
    to_command: ToCommand


@dataclass(frozen=True)
class Started(Urgent):
    """The core is there."""

    description: Any


@dataclass(frozen=True)
class Ended:
    """The last word. error: None after Close."""

    error: BaseException | None


class SocketPort:
    """The core's Port on a socket. What is emitted waits for the end of the step, but for Urgent events."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = Unpacker()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._inlets: dict[int, Inlet] = {}
        self._inbox: deque[Any] = deque()
        self._outbox: list[Any] = []

    def take(self, timeout_seconds: float) -> Iterator[Any]:
        for _ in range(READS_AT_ONCE):
            ready = self._readable.poll(timeout_seconds * 1000)
            if not ready:
                break
            for descriptor, _ in ready:
                self._read(descriptor)
            timeout_seconds = 0.0
        while self._inbox:
            yield self._inbox.popleft()

    def emit(self, event: Any) -> None:
        self._outbox.append(event)
        if isinstance(event, Urgent):
            self.flush()

    def flush(self) -> None:
        if self._outbox:
            # Taken out first: what cannot be pickled must not stand in the way of the last word.
            events, self._outbox = self._outbox, []
            self._connection.sendall(pack(events).data)

    def _read(self, descriptor: int) -> None:
        if (inlet := self._inlets.get(descriptor)) is None:
            self._receive()
            return
        self._inbox.extend((command, None) for command in inlet.read())
        if inlet.has_ended:
            self._readable.unregister(descriptor)
            del self._inlets[descriptor]

    def _receive(self) -> None:
        data, ancillary, _, _ = self._connection.recvmsg(READ_BYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
        if not data:
            os._exit(1)  # The parent is gone, and nobody is left to tell.
        for item in self._unpacker.feed(data, _descriptors(ancillary)):
            if isinstance(item, Listen):
                self._listen(item)
            else:
                self._inbox.append(item)

    def _listen(self, item: Listen) -> None:
        inlet = Inlet(socket.socket(fileno=os.dup(item.connection)), item.to_command)
        self._inlets[inlet.fileno()] = inlet
        self._readable.register(inlet, select.POLLIN)


def main() -> NoReturn:
    descriptor, parent = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )  # Held back until now by the parent.
    die_with_parent(parent)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    port = SocketPort(connection)
    error: BaseException | None = None
    try:
        _run(port)
    except BaseException as caught:
        error = caught
    _say_goodbye(port, error)
    logging.shutdown()
    os._exit(0 if error is None else 1)  # Without the interpreter's own end, which takes its time with torch.


def _run(port: SocketPort) -> None:
    start = next(port.take(timeout_seconds=START_SECONDS))
    if start.logging is not None:
        logs.configure(*start.logging)
    core = start.build(port.emit)
    port.emit(Started(core.description))
    CoreLoop(core, port).run()


def _say_goodbye(port: SocketPort, error: BaseException | None) -> None:
    if error is not None:
        error = _sendable(error)
    with suppress(Exception):  # What cannot be sent must not stand in the way of the last word.
        port.flush()
    with suppress(OSError):  # Nobody is left to tell.
        port.emit(Ended(error))
        port.flush()


def _sendable(error: BaseException) -> BaseException:
    """The error itself, if it survives the journey; its traceback, which does not travel, as a note."""
    if not isinstance(error, StartError | PdserveError):
        error.add_note("In the engine process:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)).rstrip())
    return error


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> array[int]:
    found = array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
    return found


def _end_with_parent(connection: socket.socket) -> None:
    hangup = select.poll()
    hangup.register(connection, select.POLLRDHUP)
    hangup.poll()
    os._exit(1)
