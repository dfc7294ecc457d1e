"""A TCP relay of the tests' own between two processes: passes bytes late, holds or swallows them, or cuts, on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

import psutil

Concerns = Callable[[int], bool]
"""Whether a connection from this port is one to hold or swallow."""

_Late = tuple[float, bytes]
"""When to pass it on, in the loop's time, and what. Nothing: the end."""


def connections_of(pid: int) -> Concerns:
    """Those that this process has made: gRPC dials IPv4 addresses through IPv6 sockets, too."""
    return lambda port: any(each.laddr.port == port for each in psutil.Process(pid).net_connections("tcp"))


class Relay:
    """Listens on a free port and forwards each connection to target ("host:port")."""

    def __init__(self, target: str, *, concerns: Concerns = lambda port: True) -> None:
        """concerns: which connections swallow and is_whole are for; asked once for each, when it is opened."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._concerns = concerns
        self.address = ""
        self.swallow = False
        """True: what comes is lost, in either direction; connections stay open."""
        self.is_whole = asyncio.Event()
        """Cleared: nothing passes, and passes once it is set again, as if packets had been dropped and sent anew. New connections
        open and hear nothing."""
        self.is_whole.set()
        self.is_answering = asyncio.Event()
        """Cleared: the same, but only of what comes from the target, on every connection."""
        self.is_answering.set()
        self.delay = 0.0
        """Seconds that bytes take, each way."""
        self.passed_up = 0
        """Bytes forwarded towards the target."""
        self.connections = self.concerned = 0
        """Accepted so far; of these, those to hold or swallow."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()

    def cut(self) -> None:
        """Closes every connection."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        is_concerned = self._concerns(writer.get_extra_info("peername")[1])
        self.concerned += is_concerned
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # Nobody listens there: the caller is refused too.
            writer.close()
            return
        self._writers |= {writer, there_writer}
        for source, sink, up in ((reader, there_writer, True), (there_reader, writer, False)):
            late: asyncio.Queue[_Late] = asyncio.Queue(64)
            self._start(self._take(source, late, is_concerned=is_concerned))
            self._start(self._pass(late, sink, is_concerned=is_concerned, up=up))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, source: asyncio.StreamReader, late: asyncio.Queue[_Late], *, is_concerned: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await source.read(65536):
                if not (self.swallow and is_concerned):
                    await late.put((loop.time() + self.delay, data))
        except ConnectionError:
            pass
        await late.put((loop.time() + self.delay, b""))

    async def _pass(self, late: asyncio.Queue[_Late], sink: asyncio.StreamWriter, *, is_concerned: bool, up: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if is_concerned:
                    await self.is_whole.wait()
                if not up:
                    await self.is_answering.wait()
                if not data:
                    return
                self.passed_up += len(data) if up else 0
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
            self._writers.discard(sink)
