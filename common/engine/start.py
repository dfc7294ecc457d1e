"""From a worker's configuration to its engine's."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.runner import EngineConfig, ModelRunner, page_bytes
from common.errors import StartError
from common.handoff.pool_memory import PoolMemory
from common.handoff.staging import Staging, slots_for
from common.worker_config import WorkerConfig


def size_pool(config: WorkerConfig) -> tuple[int, int]:
    """The KV pool's pages and the bytes of each. Raises StartError on a folder that cannot be served or a pool too small."""
    each = page_bytes(config.model, page_size=config.page_size, dtype=config.dtype)
    try:
        return config.pages_of(each), each
    except ValueError as error:
        raise StartError(str(error)) from error


def is_staged(config: WorkerConfig) -> bool:
    """Whether the event loop reaches the pool's pages through slots only, for it cannot address them."""
    return config.device != "cpu"


def make_memory(config: WorkerConfig) -> PoolMemory:
    """What the worker's event loop and its engine share: the KV pool's bytes, or slots for its pages. Raises StartError."""
    pages, bytes_per_page = size_pool(config)
    try:
        return PoolMemory(slots_for(bytes_per_page, pool_pages=pages) if is_staged(config) else pages, bytes_per_page)
    except OSError as error:
        raise StartError(f"cannot make the KV pool: {error}") from error


def load_runner(
    config: WorkerConfig, memory: PoolMemory, *, progress: Callable[[str], None]
) -> tuple[ModelRunner, Staging | None]:
    """The model over a pool in this memory, or with the way to the pool's pages through it. Raises StartError."""
    engine = engine_config(config, pool_pages=size_pool(config)[0])
    if is_staged(config):
        runner = ModelRunner.load(engine, progress=progress)
        return runner, Staging(memory, runner.pool)
    return ModelRunner.load(engine, pool_storage=memory.view, progress=progress), None


def engine_config(config: WorkerConfig, *, pool_pages: int) -> EngineConfig:
    return EngineConfig(
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        page_size=config.page_size,
        pool_pages=pool_pages,
        max_context=config.max_context,
        table_rows=config.max_running,
        threads=config.threads,
        load_format=config.load_format,
    )
