"""A TCP relay of the tests' own between two processes: passes bytes, holds or swallows them, or cuts, on demand."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Relay:
    """Listens on a free port and forwards each connection to target ("host:port")."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.address = ""
        self.swallow = False
        """True: what comes is lost, in either direction; connections stay open."""
        self.is_whole = asyncio.Event()
        """Cleared: nothing passes, and passes once it is set again, as if packets had been dropped and sent anew. New connections
        open and hear nothing."""
        self.is_whole.set()
        self.passed_up = 0
        """Bytes forwarded towards the target."""
        self.connections = 0
        """Accepted so far."""
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
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, there_writer}
        for source, sink, up in ((reader, there_writer, True), (there_reader, writer, False)):
            task = asyncio.ensure_future(self._pump(source, sink, up=up))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, up: bool) -> None:
        try:
            while data := await source.read(65536):
                if self.swallow:
                    continue
                await self.is_whole.wait()
                self.passed_up += len(data) if up else 0
                sink.write(data)
                await sink.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            sink.close()
            self._writers.discard(sink)
