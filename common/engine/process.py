"""ProcessEngine: an EngineHandle whose core runs in a process of its own, so that neither waits for the other's interpreter.

start()    socket pair, child started (process_child.py), Start sent; the child builds the core and says Started
call/post  a parcel per command; what the core emits in a step comes back as one parcel
end        Close, a core that raises, or a child that is killed: the kernel tells at once, by the child's pidfd
           this process ending, however: the kernel kills the child
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from common import logs
from common.descriptor import Descriptor
from common.engine.core_loop import Close
from common.engine.front import EngineFront
from common.engine.handle import Build
from common.engine.inlet import ToCommand
from common.engine.parcel import Parcel, Unpacker, pack
from common.engine.process_child import READ_BYTES, Ended, Listen, Start, Started

CLOSE_SECONDS: Final = 10.0
"""How long the step under way may take once the engine is to end; then the process is killed."""
SOCKET_BYTES: Final = 1 << 20
"""Room in the socket for a few prompts or steps; the kernel may grant less."""

_log = logging.getLogger(__name__)


class EngineDied(Exception):
    """The engine's process ended without a word: says how."""


class ProcessEngine(EngineFront):
    def __init__(self, build: Build, *, on_event: Callable[[Any], None], name: str = "engine") -> None:
        """name: what its log lines carry after this process's name."""
        super().__init__(on_event)
        self._build = build
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._pidfd = -1
        self._unpacker = Unpacker()
        self._unsent: deque[Parcel] = deque()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._last_word: Ended | None = None

    async def start(self) -> Any:
        first = pack([Start(self._build, logs.settings_of(self._name))])
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno())
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._socket.setblocking(False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._socket, self._read)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._post_parcel(first)
        return await self._started

    async def close(self) -> None:
        """An engine that is still being built, or does not come to the end of its step, is killed."""
        if self._process is None:
            return
        if not self._gone.done():
            if self._started.done() and not self._started.cancelled():
                self._send(Close(), None)
            else:
                self._kill()
            await asyncio.wait((self._gone,), timeout=CLOSE_SECONDS)
            if not self._gone.done():
                _log.warning("the engine did not come to the end of its step in %g s: it is killed", CLOSE_SECONDS)
                self._kill()
        await self._gone

    def _kill(self) -> None:
        assert self._process is not None
        self._last_word = self._last_word or Ended(None)
        self._process.kill()

    def listen(self, connection: socket.socket, to_command: ToCommand) -> None:
        with connection:
            if not self._died.done():
                self._post_parcel(pack([Listen(Descriptor(connection.fileno()), to_command)]))

    # To the child.

    def _send(self, command: Any, call_id: int | None) -> None:
        if not self._died.done():
            self._post_parcel(pack([(command, call_id)]))

    def _post_parcel(self, parcel: Parcel) -> None:
        # Copies, for the sender may close its own before the socket takes them.
        self._unsent.append(Parcel(parcel.data, tuple(map(os.dup, parcel.descriptors))))
        if len(self._unsent) == 1:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _write(self) -> None:
        """As much as the socket takes. It never blocks: the child may itself be waiting for this process to read."""
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
                sent = self._socket.sendmsg([data], rights)
                for descriptor in descriptors:
                    os.close(descriptor)
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = Parcel(data[sent:], ())
        except BlockingIOError:
            pass
        except OSError:  # It has ended: the pidfd says so, too, and how.
            self._drop_unsent()

    def _drop_unsent(self) -> None:
        for parcel in self._unsent:
            for descriptor in parcel.descriptors:
                os.close(descriptor)
        self._unsent.clear()

    # From the child.

    def _read(self) -> bool:
        """Takes in what one read yields; False if there is nothing."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # It is ending, which with a GPU takes a while: its pidfd will say so, this would say it all the time.
            self._loop.remove_reader(self._socket)
        for item in self._unpacker.feed(data):
            self._take(item)
        return bool(data)

    def _take(self, item: Any) -> None:
        if isinstance(item, Started):
            self._announce(item.description)
        elif isinstance(item, Ended):
            self._last_word = item
            self._end(item.error)
        else:
            try:
                self._deliver(item)
            except Exception as error:  # One event that is taken badly must not cost the ones after it.
                self._loop.call_exception_handler({"message": "an event of the engine was taken badly", "exception": error})

    def _on_exit(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()  # At once: the pidfd is readable when it can be reaped.
        while self._read():
            pass
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._drop_unsent()
        self._socket.close()
        self._end(EngineDied(f"the engine process {_how(code)}") if self._last_word is None else self._last_word.error)
        self._gone.set_result(None)


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """The child, with this end of the socket pair. It dies when the calling thread does: call it from one that stays."""
    held_back = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)  # Inherited: the child ignores them once it is able to.
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "common.engine", str(descriptor), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
