"""Which transport a pair of workers uses, decided once per pairing by the sender.

shm needs one host and one user: the proof is that the decode worker's abstract socket can be connected and hands over its pool.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Final, Literal

from common.errors import FailedPrecondition
from common.handoff.base import HANDSHAKE_SECONDS, Transport, hello_line, receive_pool

TransportMode = Literal["auto", "cuda_ipc", "shm", "grpc"]
_PEERCRED: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""

_log = logging.getLogger(__name__)


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


async def choose(mode: TransportMode, *, shm_socket: str, pair_id: str) -> tuple[Transport, ShmLink | None]:
    """The pair's transport, with an open link if it is shm.

    shm_socket: what PairResponse offers; empty if nothing. Raises FailedPrecondition if mode insists on one in vain.
    """
    if mode == "cuda_ipc":
        raise FailedPrecondition("--transport cuda_ipc is impossible with this decode worker: it does not offer it")
    if mode == "grpc":
        return "grpc", None
    try:
        return "shm", await asyncio.to_thread(_connect, shm_socket, pair_id)
    except (OSError, ValueError) as error:
        if mode == "shm":
            raise FailedPrecondition(f"--transport shm is impossible with this decode worker: {error}") from error
        _log.info("no shm with this decode worker, using grpc: %s", error)
        return "grpc", None


def _connect(shm_socket: str, pair_id: str) -> ShmLink:
    """The sender's side of the handshake in common/handoff/base.py; blocks at most HANDSHAKE_SECONDS a step."""
    if not shm_socket:
        raise ConnectionRefusedError("the decode worker does not offer it")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.connect(b"\0" + shm_socket.encode("ascii"))
        _check_same_user(connection)
        connection.sendall(hello_line(pair_id))
        descriptor, pool_bytes = receive_pool(connection)
    except BaseException:
        connection.close()
        raise
    return ShmLink(connection, descriptor=descriptor, pool_bytes=pool_bytes)


def _check_same_user(connection: socket.socket) -> None:
    # An abstract name can be taken by anybody on the host: prompts' KV must not be written into a stranger's memory.
    _, uid, _ = _PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    if uid != os.getuid():
        raise PermissionError(f"the decode worker runs as user {uid}, this one as {os.getuid()}")
