"""The prefill worker's engine, by device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from common.by_device import is_cuda
from common.engine.config import EngineConfig
from common.engine.handle import Emit
from common.engine.load import load_model
from common.engine.memory import tell_use
from common.engine.model_runner import ModelRunner, TensorRunner
from common.engine.start import engine_config, load_runner, pool_before_start
from common.handoff.pool_memory import PoolMemory
from prefill_worker.config import Config
from prefill_worker.core import PrefillCore
from prefill_worker.cuda_tools import cuda_tools_for

log = logging.getLogger(__name__)


def build_runner(config: EngineConfig, pool_storage: memoryview | None, progress: Callable[[str], None]) -> TensorRunner:
    """Raises StartError. Call it in the thread that will run the model. pool_storage: see ModelRunner; on the CPU only."""
    loaded = load_model(config, progress)
    if not is_cuda(config.device):
        return ModelRunner.build(loaded, config, pool_storage=pool_storage, progress=progress)
    # Imported when asked for: it needs what only a machine with a GPU has.
    from common.engine.cuda.build import build_cuda_runner

    runner = build_cuda_runner(loaded, config, progress)
    tell_use(config, progress)
    return runner


def build_core(config: Config, memory: PoolMemory, emit: Emit) -> PrefillCore:
    """Loads the model, in the thread that will run it. Raises StartError."""
    pages = pool_before_start(config)[0]
    engine = replace(engine_config(config, pool_pages=pages), chunk_tokens=config.chunk_tokens, decodes=False)
    runner, staging = load_runner(engine, memory, build=build_runner, progress=log.info)
    return PrefillCore(
        runner,
        emit=emit,
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        staging=staging,
        cuda=cuda_tools_for(runner.pool) if config.transport in ("auto", "cuda_ipc") else None,
    )
