"""PoolListener: the abstract unix socket on which senders that write into this worker's pool introduce themselves.

The greeting is drawn in common/handoff/base.py. What is sent back, and what proves that a sender is gone, is the transport's
business: ShmReceiver and CudaIpcReceiver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from common.handoff.base import HANDSHAKE_SECONDS, MAX_PAIR_ID_BYTES, parse_hello
from common.handoff.dial import peer_of

MAX_CONNECTIONS = 1024
log = logging.getLogger(__name__)


class PoolListener(ABC):
    """Event loop only. what: the transport's name in logs."""

    what: str

    def __init__(self, *, is_known: Callable[[str], bool], on_gone: Callable[[str], None]) -> None:
        """is_known(pair_id): this worker has made that pairing. on_gone(pair_id): its sender can't write any more."""
        self._is_known = is_known
        self._on_gone = on_gone
        self._connected: set[str] = set()
        self._not_gone: set[str] = set()
        """Those connected, and those that may still write though they are not."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.socket_name = f"pdserve-{secrets.token_hex(16)}"

    @abstractmethod
    def _welcome(self, connection: socket.socket, pair_id: str) -> int | None:
        """Sends what opens the pool. Returns a descriptor to be kept until the sender is gone, if one is needed to tell. Raises
        OSError or ValueError to refuse the sender, who has nothing of ours then."""

    @abstractmethod
    async def _until_closed(self, connection: socket.socket, pair_id: str) -> bool:
        """Until the sender closes its side, or is not to be listened to any more. Whether that proves that it can't write."""

    async def _until_gone(self, descriptor: int | None) -> None:
        """Until the sender can't write any more, whatever its connection says. For ever, if nothing but that tells."""
        await asyncio.Event().wait()

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
                    log.warning("cannot accept a %s connection: %s", self.what, error)
                    await asyncio.sleep(0.1)
                    continue
                if len(self._tasks) <= MAX_CONNECTIONS:
                    self._spawn(self._serve(connection))
                else:
                    log.warning("refused a %s connection: there are %d", self.what, MAX_CONNECTIONS)
                    connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        """One sender, from its hello to its end."""
        with connection:
            connection.setblocking(False)
            try:
                pair_id = await self._greet(connection)
                descriptor = self._welcome(connection, pair_id)
            except (OSError, ValueError, TimeoutError) as error:
                log.warning("refused a %s connection: %s", self.what, error or "no hello in time")
                return
            try:
                await self._attend(connection, pair_id, descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    async def _greet(self, connection: socket.socket) -> str:
        """Raises OSError, ValueError or TimeoutError if the peer is to be refused."""
        _check_same_user(connection)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            pair_id = await _read_hello(connection)
        if not self._is_known(pair_id):
            raise ValueError("the pairing is unknown")
        if pair_id in self._not_gone:
            raise ValueError("the pairing has a connection")
        return pair_id

    async def _attend(self, connection: socket.socket, pair_id: str, descriptor: int | None) -> None:
        self._connected.add(pair_id)
        self._not_gone.add(pair_id)
        closing = asyncio.ensure_future(self._until_closed(connection, pair_id))
        leaving = asyncio.ensure_future(self._until_gone(descriptor))
        try:
            await asyncio.wait((closing, leaving), return_when=asyncio.FIRST_COMPLETED)
            self._connected.discard(pair_id)
            if not (closing.done() and closing.result()):
                await leaving
        finally:
            closing.cancel()
            leaving.cancel()
        self._not_gone.discard(pair_id)
        self._on_gone(pair_id)


def _check_same_user(connection: socket.socket) -> None:
    _, uid = peer_of(connection)
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
