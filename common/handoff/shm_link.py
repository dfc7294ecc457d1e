"""ShmLink: a sender's side of the connection that stands for its mapping of a decode worker's pool (common/handoff/base.py)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from common.handoff.base import receive_welcome
from common.handoff.dial import dial


class ShmLink:
    """An open shm connection to a decode worker. descriptor: its pool, pool_bytes long; close_descriptor once it is mapped.

    Closing the link tells the decode worker that nothing writes to its pool any more: unmap first.
    """

    def __init__(self, connection: socket.socket, *, descriptor: int, pool_bytes: int) -> None:
        self._connection = connection
        self._watched = False
        self.descriptor = descriptor
        self.pool_bytes = pool_bytes

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls on_gone in the running loop when the decode worker closes its side, which is how its death shows at once."""
        self._connection.setblocking(False)
        asyncio.get_running_loop().add_reader(self._connection, self._on_readable, on_gone)
        self._watched = True

    def _on_readable(self, on_gone: Callable[[], None]) -> None:
        try:
            data = self._connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._unwatch()
            on_gone()

    def _unwatch(self) -> None:
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._watched = False

    def close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self._unwatch()
        self.close_descriptor()
        self._connection.close()


def connect_shm(shm_socket: str, pair_id: str) -> ShmLink:
    """The sender's side of the handshake in common/handoff/base.py; blocks at most HANDSHAKE_SECONDS a step. Raises OSError or
    ValueError."""
    connection = dial(shm_socket, pair_id)
    try:
        descriptor, pool_bytes = receive_welcome(connection)
    except BaseException:
        connection.close()
        raise
    return ShmLink(connection, descriptor=descriptor, pool_bytes=pool_bytes)
