"""ShmReceiver: hands this worker's pool to prefill workers on the same host, and knows which of them may still write to it.

One open connection is one mapping; its end is the proof that the mapping is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from common.handoff.base import send_welcome
from common.handoff.pool_listener import PoolListener
from common.handoff.pool_memory import PoolMemory


class ShmReceiver(PoolListener):
    what = "shared memory"

    def __init__(self, memory: PoolMemory, *, is_known: Callable[[str], bool], on_gone: Callable[[str], None]) -> None:
        super().__init__(is_known=is_known, on_gone=on_gone)
        self._memory = memory

    def _welcome(self, connection: socket.socket, pair_id: str) -> None:
        send_welcome(connection, descriptor=self._memory.descriptor, pool_bytes=self._memory.size)

    async def _until_closed(self, connection: socket.socket, pair_id: str) -> bool:
        """Whatever a sender says after its hello is ignored: only the kernel's word counts."""
        try:
            while await asyncio.get_running_loop().sock_recv(connection, 4096):
                pass
        except ConnectionResetError:
            # The peer closed with our greeting unread: an end, too.
            pass
        return True
