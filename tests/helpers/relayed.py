"""A worker that others reach through a relay: between it and the router, between the two workers, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from tests.helpers.cluster import Cluster
from tests.helpers.process import Process, free_port
from tests.helpers.relay import Concerns, Relay


class RelayedWorker:
    """async with RelayedWorker(cluster, "decode") as relayed: one more worker, to whose address a relay stands in front.

    What it dials itself (registrations, a prefill worker's decode workers) goes the straight way.
    """

    def __init__(self, cluster: Cluster, role: str, *, concerns: Concerns = lambda port: True, extra: Sequence[str] = ()) -> None:
        self.role = role
        self._cluster, self._extra = cluster, extra
        self._listen = f"127.0.0.1:{free_port()}"
        self.relay = Relay(self._listen, concerns=concerns)
        self._router = ""
        self.process: Process

    async def __aenter__(self) -> RelayedWorker:
        await self.relay.__aenter__()
        extra = ["--advertise", self.relay.address, *self._extra]
        self.process = self._cluster.start_worker(self.role, listen=self._listen, router=self._router, extra=extra)
        await asyncio.to_thread(self._cluster.wait_until_joined, self.process)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.relay.is_whole.set()
        await self.relay.__aexit__(kind, value, trace)


class CutOff(RelayedWorker):
    """The same with its registration through a relay too: cut() is a cable pulled out. It is stopped at the end."""

    def __init__(self, cluster: Cluster, role: str) -> None:
        # Slow enough to be found with a prompt under way.
        super().__init__(cluster, role, extra=["--chunk-tokens", "1"] if role == "prefill" else [])
        self._up = Relay(cluster.address)

    @property
    def address(self) -> str:
        return self.relay.address

    async def __aenter__(self) -> CutOff:
        await self._up.__aenter__()
        self._router = self._up.address
        await super().__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.mend()
        (self._cluster.prefill if self.role == "prefill" else self._cluster.decode).remove(self.process)
        await asyncio.to_thread(self.process.stop)
        await super().__aexit__(kind, value, trace)
        await self._up.__aexit__(kind, value, trace)

    def cut(self) -> None:
        for relay in (self.relay, self._up):
            relay.is_whole.clear()

    def mend(self) -> None:
        for relay in (self.relay, self._up):
            relay.is_whole.set()
