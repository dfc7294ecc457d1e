"""The prefill worker's simulated engine (--engine sim)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common.engine.handle import Emit
from common.engine.sim.engine import SimEngine
from common.engine.sim.start import Simulation, make_sim_runner
from common.handoff.pool_memory import PoolMemory
from prefill_worker.config import Config
from prefill_worker.core import PrefillCore


def make_sim_engine(config: Config, memory: PoolMemory, simulation: Simulation, on_event: Callable[[Any], None]) -> SimEngine:
    """Not started. Call within the running loop."""
    return simulation.make_engine(partial(_build_core, config, memory, simulation), on_event)


def _build_core(config: Config, memory: PoolMemory, simulation: Simulation, emit: Emit) -> PrefillCore:
    """Raises StartError."""
    return PrefillCore(
        make_sim_runner(config, memory, simulation),
        emit=emit,
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        clock=simulation.clock.now,
    )
