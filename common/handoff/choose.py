"""Which transport a pair of workers uses, decided once per pairing by the sender.

shm needs one host and one user: the proof is that the decode worker's abstract socket can be connected and hands over its pool.
cuda_ipc needs the same and a GPU here that reaches the decode worker's: the proof is a nonce read through the mapping.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Literal

from common.errors import FailedPrecondition
from common.handoff.base import Transport, receive_welcome
from common.handoff.dial import dial

TransportMode = Literal["auto", "cuda_ipc", "shm", "grpc", "sim"]
OpenCudaIpc = Callable[[], Awaitable[None]]

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


async def choose(
    mode: TransportMode, *, shm_socket: str, pair_id: str, open_cuda_ipc: OpenCudaIpc | None = None
) -> tuple[Transport, ShmLink | None]:
    """The pair's transport, with an open link if it is shm or sim.

    shm_socket: what PairResponse offers; empty if nothing. open_cuda_ipc: maps the pool that it offers in GPU memory, raises
    FailedPrecondition if it can't; None if nothing is offered. Raises FailedPrecondition if mode insists on one in vain, and
    Unavailable if open_cuda_ipc does.
    """
    if mode in ("auto", "cuda_ipc") and await _opens(mode, open_cuda_ipc):
        return "cuda_ipc", None
    if mode == "grpc":
        return "grpc", None
    try:
        return "sim" if mode == "sim" else "shm", await asyncio.to_thread(_connect, shm_socket, pair_id)
    except (OSError, ValueError) as error:
        if mode in ("shm", "sim"):
            raise FailedPrecondition(f"--transport {mode} is impossible with this decode worker: {error}") from error
        _log.info("no shm with this decode worker, using grpc: %s", error)
        return "grpc", None


async def _opens(mode: TransportMode, open_cuda_ipc: OpenCudaIpc | None) -> bool:
    """Whether cuda_ipc works; raises instead of False if mode insists on it."""
    try:
        if open_cuda_ipc is None:
            raise FailedPrecondition("the decode worker does not offer it")
        await open_cuda_ipc()
        return True
    except FailedPrecondition as error:
        if mode == "cuda_ipc":
            raise FailedPrecondition(f"--transport cuda_ipc is impossible with this decode worker: {error}") from error
        if open_cuda_ipc is not None:  # Between workers on CPUs it is no news.
            _log.info("no cuda_ipc with this decode worker, trying the next transport: %s", error)
        return False


def _connect(shm_socket: str, pair_id: str) -> ShmLink:
    """The sender's side of the handshake in common/handoff/base.py; blocks at most HANDSHAKE_SECONDS a step."""
    connection = dial(shm_socket, pair_id)
    try:
        descriptor, pool_bytes = receive_welcome(connection)
    except BaseException:
        connection.close()
        raise
    return ShmLink(connection, descriptor=descriptor, pool_bytes=pool_bytes)
