"""CudaIpcLink: the sender's end of a cuda_ipc pairing: the mapping of a decode worker's pool and the socket that stands for it.

Both live in the engine's process, since its exit is what proves that nothing writes any more (common/handoff/base.py).
"""

from __future__ import annotations

import logging
import socket
from typing import Final

from common.errors import FailedPrecondition
from common.handoff.base import receive_size
from common.handoff.cuda_driver import CudaDriver
from common.handoff.cuda_ipc import MappedPool, PoolExport, open_pool
from common.handoff.dial import dial
from common.handoff.frames import GOODBYE, frame

GOODBYE_SECONDS: Final = 1.0
"""How long the goodbye may wait for a decode worker that does not read."""

_log = logging.getLogger(__name__)


class CudaIpcLink:
    """Engine thread only. base: the pool's first byte in this process's device memory."""

    def __init__(self, connection: socket.socket, pool: MappedPool) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._pool = pool
        self._unsent = b""

    @classmethod
    def open(cls, export: PoolExport, *, socket_name: str, pair_id: str, driver: CudaDriver) -> CudaIpcLink:
        """Greets, maps and checks; blocks at most HANDSHAKE_SECONDS a step. Raises FailedPrecondition if it cannot be, and
        CudaError if this process's context is lost: then the socket stays open until the process has ended."""
        try:
            connection = dial(socket_name, pair_id)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"no connection to its socket: {error}") from error
        try:
            if (size := receive_size(connection)) != export.pool_bytes:
                raise FailedPrecondition(f"its pool has {size} bytes, not the {export.pool_bytes} it said")
            return cls(connection, open_pool(export, driver))
        except OSError as error:
            connection.close()
            raise FailedPrecondition(f"its socket does not answer: {error}") from error
        except FailedPrecondition:
            _say_goodbye(connection)
            raise

    @property
    def base(self) -> int:
        return self._pool.base

    @property
    def pool_bytes(self) -> int:
        return self._pool.pool_bytes

    def send(self, message: bytes) -> bool:
        """Puts one frame on its way without waiting; False if it can't be sent now, for the peer does not read."""
        try:
            framed = frame(message)
        except ValueError:
            return False
        if not self._flush():
            return False
        self._unsent = framed
        self._flush()
        return True

    def is_peer_gone(self) -> bool:
        """Whether the decode worker has closed its side, which it does only at its end or when it wants nothing more from us."""
        self._flush()
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
        _say_goodbye(self._connection, after=self._unsent)

    def _flush(self) -> bool:
        """Whether nothing is left to send: a frame once begun must be ended before the next."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent = b""  # The peer has gone: nobody reads it.
        return True


def _say_goodbye(connection: socket.socket, *, after: bytes = b"") -> None:
    with connection:
        try:
            connection.settimeout(GOODBYE_SECONDS)
            connection.sendall(after + GOODBYE)
        except OSError as error:
            # It waits for the end of this process then; nothing to worry about if it has ended itself.
            _log.info("no goodbye to a decode worker: %s", error)
