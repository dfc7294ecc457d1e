"""Member: one simulated worker of a process that has many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Final, Literal

from prometheus_client import CollectorRegistry

import decode_worker.config
import prefill_worker.config
from bench.fleet.lines import Lines
from bench.fleet.spells import Spells
from common.config import parse_config
from common.engine.sim.engine import SimEngine
from common.engine.sim.start import Simulation
from common.engine.start import make_memory
from common.metrics import forget_gauges
from common.rpc.process import Stop
from decode_worker.server import make_worker, run_worker
from prefill_worker.server import PrefillServer

Role = Literal["prefill", "decode"]
LAST_WORDS_SECONDS: Final = 10.0
"""How long what is left of a worker that was killed may take to end. Nothing of it reaches anybody."""
log = logging.getLogger(__name__)


class Member:
    """Event loop only. name: of its place in the fleet, which a successor takes over; its worker id is its own."""

    def __init__(self, role: Role, name: str, arguments: Sequence[str], *, seed: int) -> None:
        """arguments: the worker's own, as on a command line. Raises StartError; a wrong flag ends the process."""
        self.role = role
        self.name = name
        self._arguments = [*arguments, "--engine", "sim"]
        self._stop = Stop()
        self._seed = seed
        self._registry = CollectorRegistry()
        self._simulation: Simulation
        self._lines: Lines
        self._life: asyncio.Task[int]
        self._pauses = Spells(lambda paused: self.engine.pause() if paused else self.engine.resume(), well=0.0)
        self._slowness = Spells(lambda factor: setattr(self._simulation.clock, "slowness", factor), well=1.0)
        self._failing = Spells(lambda share: setattr(self._simulation.transfers, "failing", share), well=0.0)

    async def start(self) -> None:
        """Until it serves; it registers with its routers by itself."""
        if self.role == "prefill":
            await self._start_prefill()
        else:
            self._start_decode()

    @property
    def engine(self) -> SimEngine:
        """Once started."""
        assert self._simulation.engine is not None
        return self._simulation.engine

    @property
    def lag_seconds(self) -> float:
        """By how much this machine was too slow for what the worker simulated, in all."""
        return self._simulation.clock.lag_seconds

    @property
    def has_ended(self) -> bool:
        return self._life.done()

    # Faults.

    async def kill(self) -> None:
        """As by kill -9: its streams break at once, nothing is finished, told or given back."""
        self.engine.pause()
        await self._lines.cut()
        for link in list(self._simulation.transfers.links):
            link.close()
        self.engine.kill()
        await self._buried()

    async def stop(self) -> None:
        """As by SIGTERM: it drains and leaves."""
        self._stop.requested.set()
        await self._buried()

    async def pause(self, seconds: float) -> None:
        """Its engine stands still: no step, no grant, no commit."""
        await self._pauses.last(1.0, seconds)

    async def slow(self, factor: float, seconds: float) -> None:
        """Its steps and transfers take that many times as long."""
        await self._slowness.last(factor, seconds)

    async def fail_transfers(self, share: float, seconds: float) -> None:
        """That share of the transfers that begin here break before their last page."""
        await self._failing.last(share, seconds)

    # A life.

    async def _start_prefill(self) -> None:
        config = parse_config(prefill_worker.config.Config, prog="prefill_worker", description="", argv=self._arguments, env={})
        self._simulation, self._lines = Simulation(config, seed=self._seed), Lines(config)
        server = PrefillServer(
            config,
            memory=make_memory(config),
            security=self._lines,
            simulation=self._simulation,
            registry=self._registry,
        )
        await server.listen()
        await server.load()
        self._live(self._live_prefill(server))

    async def _live_prefill(self, server: PrefillServer) -> int:
        try:
            return await server.ended(self._stop)
        finally:
            await server.stop_listening()

    def _start_decode(self) -> None:
        config = parse_config(decode_worker.config.Config, prog="decode_worker", description="", argv=self._arguments, env={})
        self._simulation, self._lines = Simulation(config, seed=self._seed), Lines(config)
        worker = make_worker(config, memory=make_memory(config), simulation=self._simulation, registry=self._registry)
        self._live(run_worker(worker, config, self._stop, security=self._lines))

    def _live(self, life: Awaitable[int]) -> None:
        self._life = asyncio.ensure_future(life)
        self._life.add_done_callback(self._on_end)

    def _on_end(self, life: asyncio.Task[int]) -> None:
        if not life.cancelled() and (error := life.exception()) is not None and not self._lines.is_cut:
            log.error("%s has ended", self.name, exc_info=error)

    async def _buried(self) -> None:
        done, _ = await asyncio.wait((self._life,), timeout=LAST_WORDS_SECONDS)
        if not done:
            log.warning("%s did not end in %g s", self.name, LAST_WORDS_SECONDS)
            self._life.cancel()
            await asyncio.wait((self._life,))
        forget_gauges(self._registry)
