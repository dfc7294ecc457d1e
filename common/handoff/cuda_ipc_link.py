"""CudaIpcLink: the sender's end of a cuda_ipc pairing: the mapping of a decode worker's pool, the socket that stands for it, and
the line to the decode worker's engine.

All of it lives in the engine's process, since its exit is what proves that nothing writes any more (common/handoff/base.py).
"""

from __future__ import annotations

import logging
import socket
from typing import Final

from common.engine.inlet import MAX_MESSAGE_BYTES
from common.errors import FailedPrecondition
from common.handoff.base import GOODBYE, receive_welcome
from common.handoff.cuda_driver import CudaDriver
from common.handoff.cuda_ipc import MappedPool, PoolExport, open_pool
from common.handoff.dial import dial

GOODBYE_SECONDS: Final = 1.0
"""How long the goodbye may wait for a decode worker that does not read."""

_log = logging.getLogger(__name__)


class CudaIpcLink:
    """Engine thread only. base: the pool's first byte in this process's device memory."""

    def __init__(self, connection: socket.socket, line: socket.socket, pool: MappedPool) -> None:
        connection.setblocking(False)
        line.setblocking(False)
        self._connection = connection
        self._line = line
        self._pool = pool

    @classmethod
    def open(cls, export: PoolExport, *, socket_name: str, pair_id: str, driver: CudaDriver) -> CudaIpcLink:
        """Greets, maps and checks; blocks at most HANDSHAKE_SECONDS a step. Raises FailedPrecondition if it cannot be, and
        CudaError if this process's context is lost: then the socket stays open until the process has ended."""
        try:
            connection = dial(socket_name, pair_id)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"no connection to its socket: {error}") from error
        try:
            descriptor, size = receive_welcome(connection)
        except OSError as error:
            connection.close()
            raise FailedPrecondition(f"its socket does not answer: {error}") from error
        line = socket.socket(fileno=descriptor)
        try:
            if size != export.pool_bytes:
                raise FailedPrecondition(f"its pool has {size} bytes, not the {export.pool_bytes} it said")
            return cls(connection, line, open_pool(export, driver))
        except FailedPrecondition:
            line.close()
            _say_goodbye(connection)
            raise

    @property
    def base(self) -> int:
        return self._pool.base

    @property
    def pool_bytes(self) -> int:
        return self._pool.pool_bytes

    def send(self, message: bytes) -> bool:
        """Puts one message on its way to the decode worker's engine, whole and without waiting; False if it is too long or can't
        be sent now, for the peer does not read."""
        if not 0 < len(message) <= MAX_MESSAGE_BYTES:
            return False
        try:
            return self._line.send(message) == len(message)
        except OSError:  # Full, or the peer has gone.
            return False

    def is_peer_gone(self) -> bool:
        """Whether the decode worker has closed its side, which it does only at its end or when it wants nothing more from us."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Waits for the kernels, unmaps, then says so. Raises CudaError if the context is lost: the decode worker is not told
        that nothing is written any more, and learns it from the end of this process."""
        self._pool.close()
        self._line.close()
        _say_goodbye(self._connection)


def _say_goodbye(connection: socket.socket) -> None:
    with connection:
        try:
            connection.settimeout(GOODBYE_SECONDS)
            connection.sendall(GOODBYE)
        except OSError as error:
            # It waits for the end of this process then; nothing to worry about if it has ended itself.
            _log.info("no goodbye to a decode worker: %s", error)
