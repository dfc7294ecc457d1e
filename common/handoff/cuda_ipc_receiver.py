"""CudaIpcReceiver: knows which prefill workers' GPUs may store into this worker's pool, and gives each a line to its engine.

Proof that a sender stores no more is its goodbye, or that the process which connected, and so has the mapping, has exited. The
end of its connection alone is none: a killed process's socket may read EOF before its GPU context is gone.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable

from common.handoff.base import GOODBYE, send_welcome
from common.handoff.dial import peer_of
from common.handoff.pool_listener import PoolListener

READ_BYTES = 4096


class CudaIpcReceiver(PoolListener):
    what = "cuda_ipc"

    def __init__(
        self,
        pool_bytes: int,
        *,
        is_known: Callable[[str], bool],
        on_gone: Callable[[str], None],
        on_line: Callable[[str, socket.socket], None],
    ) -> None:
        """on_line(pair_id, socket): owns this worker's end of the line on which that sender's engine sends commits ahead. It
        reads EOF when the sender has closed its own or ended. Raises OSError to refuse the sender."""
        super().__init__(is_known=is_known, on_gone=on_gone)
        self._pool_bytes = pool_bytes
        self._on_line = on_line

    def _welcome(self, connection: socket.socket, pair_id: str) -> int:
        pidfd = _pidfd_of(connection)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._on_line(pair_id, ours)  # First, for the sender has the pool once it is welcomed.
                send_welcome(connection, descriptor=theirs.fileno(), pool_bytes=self._pool_bytes)
        except OSError:
            os.close(pidfd)
            raise
        return pidfd

    async def _until_closed(self, connection: socket.socket, pair_id: str) -> bool:
        said = b""
        try:
            while data := await asyncio.get_running_loop().sock_recv(connection, READ_BYTES):
                said = (said + data)[: len(GOODBYE) + 1]
        except ConnectionResetError:
            pass  # The peer closed with our greeting unread: an end, too.
        return said == GOODBYE

    async def _until_gone(self, descriptor: int | None) -> None:
        assert descriptor is not None
        exited, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)


def _pidfd_of(connection: socket.socket) -> int:
    """Of the process that connected. Raises OSError if it cannot be seen from here, ValueError if it is gone."""
    pid, _ = peer_of(connection)
    if pid <= 0:
        raise ValueError("the sender's process is not in this worker's pid namespace")
    pidfd = os.pidfd_open(pid)
    # While its end of the connection is open the process lives, so it is that one and no other that got its number.
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        os.close(pidfd)
        raise ValueError("the sender hung up before it was welcomed")
    return pidfd
