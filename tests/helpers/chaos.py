"""Faults at random: workers killed and replaced, stopped, cut off, told to leave; everything whole again at the end."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from tests.helpers.cluster import Cluster
from tests.helpers.relayed import RelayedWorker

ROLES = ("prefill", "decode")


class Chaos:
    """async with Chaos(cluster, rng, counts={"prefill": 2, "decode": 2}) as chaos: relayed workers, and faults at them.

    Faults overlap, but a worker has one at a time, and one worker of each role at least has none. story: what was done, and when
    in seconds since the start. done: how often.
    """

    def __init__(
        self, cluster: Cluster, rng: random.Random, *, counts: dict[str, int], kinds: Sequence[str], pause: float = 0.25
    ) -> None:
        """kinds: names of methods below. pause: mean seconds between two faults."""
        self._cluster, self._rng, self._counts, self._pause = cluster, rng, counts, pause
        self._kinds: list[Callable[[RelayedWorker], Awaitable[RelayedWorker | None]]] = [getattr(self, name) for name in kinds]
        self._well: dict[str, list[RelayedWorker]] = {role: [] for role in ROLES}
        self._faults: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self.story: list[str] = []
        self.done = Counter[str]()

    async def __aenter__(self) -> Chaos:
        for role, count in self._counts.items():
            self._well[role] += await asyncio.gather(*(self._new(role) for _ in range(count)))
        await asyncio.to_thread(self._cluster.router.wait_for_line, "router ready on")
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in (worker for workers in self._well.values() for worker in workers):
            await worker.relay.__aexit__(None, None, None)

    async def during(self, work: Awaitable[None]) -> None:
        """Faults until work is done, then all of them are mended."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._rng.expovariate(1 / self._pause))
                self._strike()
        finally:
            task.cancel()
            if self._faults:
                await asyncio.wait(self._faults)
            print("\n".join(self.story))
        await task

    def _strike(self) -> None:
        role, kind = self._rng.choice(ROLES), self._rng.choice(self._kinds)
        if len(self._well[role]) < 2:
            return
        worker = self._well[role].pop(self._rng.randrange(len(self._well[role])))
        self.done[kind.__name__] += 1
        self.story.append(f"{time.monotonic() - self._began:7.3f} {kind.__name__} {role} {worker.process.pid}")
        fault = asyncio.ensure_future(self._suffer(role, kind(worker)))
        self._faults.add(fault)
        fault.add_done_callback(self._faults.discard)

    async def _suffer(self, role: str, fault: Awaitable[RelayedWorker | None]) -> None:
        if (survivor := await fault) is not None:
            self._well[role].append(survivor)
            self.story.append(f"{time.monotonic() - self._began:7.3f} well {role} {survivor.process.pid}")

    async def kill(self, worker: RelayedWorker) -> RelayedWorker:
        """kill -9, and another one is started."""
        worker.process.kill()
        return await self._replace(worker)

    async def leave(self, worker: RelayedWorker) -> RelayedWorker:
        """SIGTERM, and another one is started."""
        worker.process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, within=30) == 0
        return await self._replace(worker)

    async def stop(self, worker: RelayedWorker) -> RelayedWorker:
        """SIGSTOP for a while."""
        worker.process.pause()
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        worker.process.resume()
        return worker

    async def hold(self, worker: RelayedWorker) -> RelayedWorker:
        """Nothing passes to or from it for a while, as if packets were dropped."""
        worker.relay.is_whole.clear()
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        worker.relay.is_whole.set()
        return worker

    async def cut(self, worker: RelayedWorker) -> RelayedWorker:
        """Every connection to it is closed."""
        worker.relay.cut()
        return worker

    async def _replace(self, worker: RelayedWorker) -> RelayedWorker:
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        self._cluster.processes_of(worker.role).remove(worker.process)
        await worker.relay.__aexit__(None, None, None)
        return await self._new(worker.role)

    async def _new(self, role: str) -> RelayedWorker:
        return await RelayedWorker(self._cluster, role).__aenter__()
