"""The decode worker's simulated engine (--engine sim)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common.engine.handle import Emit
from common.engine.sim.engine import SimEngine
from common.engine.sim.start import Simulation, make_sim_runner
from common.handoff.pool_memory import PoolMemory
from decode_worker.config import Config
from decode_worker.core import DecodeCore
from decode_worker.local_prefill import PromptLimits


def make_sim_engine(config: Config, memory: PoolMemory, simulation: Simulation, on_event: Callable[[Any], None]) -> SimEngine:
    """Not started. Call within the running loop."""
    return simulation.make_engine(partial(_build_core, config, memory, simulation), on_event)


def _build_core(config: Config, memory: PoolMemory, simulation: Simulation, emit: Emit) -> DecodeCore:
    """Raises StartError."""
    runner = make_sim_runner(config, memory, simulation)
    return DecodeCore(
        runner,
        pool_pages=runner.pool.num_pages,
        max_running=config.max_running,
        lease=config.lease,
        emit=emit,
        local_prefill=PromptLimits(config.chunk_tokens, config.max_requests) if config.prefills else None,
        clock=simulation.clock.now,
    )
