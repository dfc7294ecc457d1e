"""From a worker's configuration to its engine's."""

from __future__ import annotations

from common.engine.runner import EngineConfig, page_bytes
from common.errors import StartError
from common.handoff.pool_memory import PoolMemory
from common.worker_config import WorkerConfig


def size_pool(config: WorkerConfig) -> tuple[int, int]:
    """The KV pool's pages and the bytes of each. Raises StartError on a folder that cannot be served or a pool too small."""
    each = page_bytes(config.model, page_size=config.page_size, dtype=config.dtype)
    try:
        return config.pages_of(each), each
    except ValueError as error:
        raise StartError(str(error)) from error


def make_memory(config: WorkerConfig) -> PoolMemory:
    """The KV pool's bytes, for the engine to live in and the event loop to read and write. Raises StartError."""
    pages, bytes_per_page = size_pool(config)
    try:
        return PoolMemory(pages, bytes_per_page)
    except OSError as error:
        raise StartError(f"cannot make the KV pool: {error}") from error


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
