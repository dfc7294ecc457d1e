"""Lines: everything that connects one worker of several in a process with others, so that it can be cut all at once."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Final

import grpc

from common.address import Address
from common.rpc.channels import make_channel
from common.rpc.security import Security
from common.security_config import SecurityConfig

NOWHERE: Final = "unix-abstract:pdserve-nowhere"


class Lines(Security):
    """The server and the channels that one worker makes. Its connections to pools are the engine's business."""

    def __init__(self, config: SecurityConfig) -> None:
        super().__init__(config)
        self._servers: list[grpc.aio.Server] = []
        self._channels: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self.is_cut = False

    def make_server(self, **options: Any) -> grpc.aio.Server:
        server = super().make_server(**options)
        self._servers.append(server)
        return server

    def connect(self, address: Address | str, **options: Any) -> grpc.aio.Channel:
        if self.is_cut:
            return make_channel(NOWHERE)
        channel = super().connect(address, **options)
        self._channels.add(channel)
        return channel

    async def cut(self) -> None:
        """Ends every call and connection of the worker, both ways, without a word; nothing it tries afterwards arrives."""
        self.is_cut = True
        await asyncio.gather(
            *(server.stop(0) for server in self._servers), *(channel.close(None) for channel in list(self._channels))
        )
