"""ShmReceiver: hands this worker's pool to prefill workers on the same host, and knows which of them may still write to it.

The handshake is drawn in common/handoff/base.py. One open connection is one mapping; its end is the proof that the mapping is
gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from common.handoff.base import HANDSHAKE_SECONDS, MAX_PAIR_ID_BYTES, parse_hello, send_pool
from common.handoff.pool_memory import PoolMemory

MAX_CONNECTIONS = 1024
log = logging.getLogger(__name__)
_CREDENTIALS = struct.Struct("iII")


class ShmReceiver:
    """Event loop only."""

    def __init__(self, memory: PoolMemory, *, is_known: Callable[[str], bool], on_gone: Callable[[str], None]) -> None:
        """is_known(pair_id): this worker has made that pairing. on_gone(pair_id): its sender can't write any more."""
        self._memory = memory
        self._is_known = is_known
        self._on_gone = on_gone
        self._connected: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.socket_name = f"pdserve-{secrets.token_hex(16)}"

    def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(b"\0" + self.socket_name.encode())
        listener.listen()
        self._spawn(self._accept(listener))

    def is_connected(self, pair_id: str) -> bool:
        return pair_id in self._connected

    async def close(self) -> None:
        """Ends all connections, without on_gone: the senders see this worker go."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:
                    # Out of descriptors, say: those connected go on, and the next one may find room.
                    log.warning("cannot accept a shared memory connection: %s", error)
                    await asyncio.sleep(0.1)
                    continue
                if len(self._tasks) <= MAX_CONNECTIONS:
                    self._spawn(self._serve(connection))
                else:
                    log.warning("refused a shared memory connection: there are %d", MAX_CONNECTIONS)
                    connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        """One sender, from its hello to its EOF."""
        with connection:
            connection.setblocking(False)
            pair_id = await self._greet(connection)
            if pair_id is None:
                return
            self._connected.add(pair_id)
            await _until_closed(connection)
            self._connected.discard(pair_id)
            self._on_gone(pair_id)

    async def _greet(self, connection: socket.socket) -> str | None:
        """The handshake; None if the peer was refused, and then it has nothing of ours."""
        try:
            _check_same_user(connection)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                pair_id = await _read_hello(connection)
            if not self._is_known(pair_id):
                raise ValueError("the pairing is unknown")
            if pair_id in self._connected:
                raise ValueError("the pairing has a connection")
            send_pool(connection, pool_fd=self._memory.descriptor, pool_bytes=self._memory.size)
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("refused a shared memory connection: %s", error or "no hello in time")
            return None
        return pair_id


def _check_same_user(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise ValueError(f"user {uid} is not this worker's user")


async def _read_hello(connection: socket.socket) -> str:
    received = b""
    while (pair_id := parse_hello(received)) is None:
        more = await asyncio.get_running_loop().sock_recv(connection, MAX_PAIR_ID_BYTES + 1)
        if not more:
            raise ValueError("the peer hung up before its hello was complete")
        received += more
    return pair_id


async def _until_closed(connection: socket.socket) -> None:
    """Whatever a sender says after its hello is ignored: only the kernel's word counts."""
    try:
        while await asyncio.get_running_loop().sock_recv(connection, 4096):
            pass
    except ConnectionResetError:
        # The peer closed with our greeting unread: an end, too.
        pass
