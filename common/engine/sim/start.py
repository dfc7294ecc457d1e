"""From a worker's configuration to its simulated engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from common.engine.handle import Build
from common.engine.model_config import ModelConfig
from common.engine.sim.clock import SimClock
from common.engine.sim.engine import SimEngine
from common.engine.sim.pages import TAG_BYTES, SimPool, SimRows
from common.engine.sim.profile import SimProfile
from common.engine.sim.runner import SimRunner
from common.engine.sim.tokens import SimVocabulary
from common.errors import StartError
from common.fingerprint import fingerprint
from common.handoff.pool_memory import PoolMemory
from common.handoff.sim_link import SimTransfers
from common.model_dir import ModelDir
from common.work import Compatibility
from common.worker_config import WorkerConfig

SIMULATED: Final = "simulated"
"""The dtype of KV that is not there: a router refuses to pair a worker that has some with one that has none."""


class Simulation:
    """What a simulated worker's engine and event loop go by, and where faults are injected: engine is paused or killed, the clock
    slowed, transfers fail."""

    def __init__(self, config: WorkerConfig, *, seed: int = 0) -> None:
        """seed: of which transfers fail. Raises StartError on a profile that cannot be read."""
        self.profile = SimProfile.read(config.sim_profile)
        self.clock = SimClock(time_scale=config.time_scale)
        self.transfers = SimTransfers(
            base_seconds=lambda: self.clock.wall_seconds(self.profile.handoff_base),
            page_seconds=lambda: self.clock.wall_seconds(self.profile.handoff_per_page),
            seed=seed,
        )
        self.engine: SimEngine | None = None

    def make_engine(self, build: Build, on_event: Callable[[Any], None]) -> SimEngine:
        """Once, within the running loop. Not started."""
        self.engine = SimEngine(build, on_event=on_event, clock=self.clock)
        return self.engine


def make_sim_memory(config: WorkerConfig) -> PoolMemory:
    """The tags of as many pages as the simulated worker has room for. Raises StartError."""
    pages = config.pool_pages or SimProfile.read(config.sim_profile).pool_tokens // config.page_size
    if pages < 1:
        raise StartError(f"the profile's pool_tokens must hold at least one page of {config.page_size} tokens")
    try:
        return PoolMemory(pages, TAG_BYTES)
    except OSError as error:
        raise StartError(f"cannot make the pool's tags: {error}") from error


def make_sim_runner(config: WorkerConfig, memory: PoolMemory, simulation: Simulation) -> SimRunner:
    """Reads the model folder's config only. Raises StartError on a folder that cannot be served."""
    folder = ModelDir.open(config.model, need_weights=False, need_tokenizer=False)
    shape = ModelConfig.of(folder)
    return SimRunner(
        compatibility=Compatibility(
            fingerprint(folder),
            SIMULATED,
            page_size=config.page_size,
            max_context=min(config.max_context or shape.max_context, shape.max_context),
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        ),
        vocabulary=SimVocabulary(folder.vocab_size, frozenset(folder.eos_token_ids)),
        pool=SimPool(memory, page_size=config.page_size),
        page_table=SimRows(config.max_running, page_size=config.page_size),
        profile=simulation.profile,
        clock=simulation.clock,
    )
