"""The decode worker's engine, by device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from common.by_device import is_cuda
from common.engine.config import EngineConfig
from common.engine.handle import Emit
from common.engine.load import load_model
from common.engine.memory import tell_use
from common.engine.model_runner import ModelRunner, TensorRunner
from common.engine.start import engine_config, load_runner, pool_before_start
from common.handoff.pool_memory import PoolMemory
from decode_worker.config import Config
from decode_worker.core import DecodeCore
from decode_worker.cuda_export import export_kv_pool
from decode_worker.local_prefill import PromptLimits

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from decode_worker.grammar_masks import MaskSource


def build_runner(
    config: EngineConfig,
    pool_storage: memoryview | None,
    progress: Callable[[str], None],
    *,
    masks: MaskSource | None = None,
) -> TensorRunner:
    """Raises StartError. Call it in the thread that will run the model. pool_storage: see ModelRunner; on the CPU only.
    masks: see GraphRunner; on a GPU only."""
    loaded = load_model(config, progress)
    if not is_cuda(config.device):
        return ModelRunner.build(loaded, config, pool_storage=pool_storage, progress=progress)
    # Imported when asked for: they need what only a machine with a GPU has.
    from common.engine.cuda.build import build_cuda_runner
    from decode_worker.graph_runner import GraphRunner

    runner = build_cuda_runner(loaded, config, progress)
    capture = len(config.graph_sizes) > 0 and runner.attention.decode.can_capture
    graphs = GraphRunner(runner, sizes=config.graph_sizes, capture=capture, progress=progress, masks=masks)
    tell_use(config, progress)
    return graphs


def build_core(config: Config, memory: PoolMemory, emit: Emit) -> DecodeCore:
    """Loads the model, in the thread that will run it. Raises StartError."""
    engine = replace(
        engine_config(config, pool_pages=pool_before_start(config)[0]),
        decode_attention=config.decode_attention,
        graph_sizes=config.graph_sizes,
        chunk_tokens=config.chunk_tokens if config.prefills else 0,
    )
    runner, staging = load_runner(engine, memory, build=build_runner, progress=log.info)
    return DecodeCore(
        runner,
        pool_pages=runner.pool.num_pages,
        max_running=config.max_running,
        lease=config.lease,
        emit=emit,
        local_prefill=PromptLimits(config.chunk_tokens, config.max_requests) if config.prefills else None,
        staging=staging,
        cuda_pool=export_kv_pool(runner.pool) if config.cuda_ipc else None,
    )
