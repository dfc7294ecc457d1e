"""Announcement: a worker that starts says so to its routers, before it loads anything.

Loading a model takes seconds to minutes. Routers have requests wait for a worker that is on its way, and for one that has crashed
they cannot know it until its successor says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Final

import grpc

from common.address import Address
from common.rpc.channels import Connect, make_channel
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from common.rpc.registration import PATIENCE
from common.work import Role

RETRY_SECONDS: Final = 0.5
_REFUSALS: Final = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
log = logging.getLogger(__name__)


class Announcement:
    """async with Announcement(...): stands at each router until the block's end, or what ends_after() was told. Nobody relies on
    its being heard: a router that is not there, or does not know the call, is none of the worker's troubles."""

    def __init__(self, routers: Sequence[Address], role: Role, *, connect: Connect = make_channel) -> None:
        self._routers, self._role, self._connect = routers, role, connect
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Announcement:
        self._tasks = [asyncio.create_task(self._stand(router), name=f"announcement {router}") for router in self._routers]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ends_after(self, moment: Coroutine[Any, Any, None]) -> None:
        """Ends it once that has returned."""
        waiting = asyncio.create_task(moment)
        waiting.add_done_callback(lambda _: self._end())
        self._tasks.append(waiting)

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _stand(self, router: Address) -> None:
        while True:
            try:
                async with self._connect(router, silence=PATIENCE) as channel:
                    request = registry_pb2.AnnounceRequest(role=self._role)
                    async for _ in registry_pb2_grpc.RegistryServiceStub(channel).Announce(request):
                        pass
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:  # Registering meets the same, and says so.
                    log.debug("router %s takes no announcement: %s", router, error.details())
                    return
            except Exception:
                log.exception("this worker's start is announced to router %s no more", router)
                return
            await asyncio.sleep(RETRY_SECONDS)
