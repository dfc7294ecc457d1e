"""From a worker's configuration to its engine's, and what can go wrong on the way as one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from common.by_device import is_cuda
from common.engine.config import EngineConfig
from common.engine.sim.start import make_sim_memory
from common.errors import StartError
from common.handoff.pool_memory import PoolMemory
from common.worker_config import MIB, WorkerConfig

if TYPE_CHECKING:  # torch's import takes seconds and half a GiB, which a simulated worker has no use for.
    from common.engine.model_runner import TensorRunner
    from common.handoff.staging import Staging

OUT_OF_CPU_MEMORY = "DefaultCPUAllocator"
CUDA_MODULES = ("flashinfer", "triton", "cuda")
"""What the extra `cuda` brings."""

BuildRunner = Callable[[EngineConfig, memoryview | None, Callable[[str], None]], "TensorRunner"]
"""(engine, where its pool is to be or None for memory of its own, progress) -> the worker's Runner. Raises StartError."""


def pool_before_start(config: WorkerConfig) -> tuple[int | None, int]:
    """The KV pool's pages, None if only the started engine knows (CUDA), and the bytes of each. Raises StartError on a folder
    that cannot be served or a pool too small."""
    from common.engine.load import page_bytes

    each = page_bytes(config.model, page_size=config.page_size, dtype=config.dtype)
    try:
        return config.pages_before_start(each), each
    except ValueError as error:
        raise StartError(str(error)) from error


def make_memory(config: WorkerConfig) -> PoolMemory:
    """What the worker's event loop and its engine share: the KV pool's bytes or, for a pool in a GPU, slots for its pages. Raises
    StartError."""
    if config.is_simulated:
        return make_sim_memory(config)
    from common.handoff.staging import slots_for

    pages, bytes_per_page = pool_before_start(config)
    try:
        return PoolMemory(slots_for(bytes_per_page, pool_pages=pages) if config.on_cuda else pages or 0, bytes_per_page)
    except OSError as error:
        raise StartError(f"cannot make the KV pool: {error}") from error


def load_runner(
    engine: EngineConfig, memory: PoolMemory, *, build: BuildRunner, progress: Callable[[str], None]
) -> tuple[TensorRunner, Staging | None]:
    """The model over a pool in this memory, or with the way to the pool's pages through it. Raises StartError."""
    with starting_on(engine.device):
        if not is_cuda(engine.device):
            return build(engine, memory.view, progress), None
        from common.handoff.staging import Staging

        runner = build(engine, None, progress)
        return runner, Staging(memory, runner.pool)


def engine_config(config: WorkerConfig, *, pool_pages: int | None) -> EngineConfig:
    return EngineConfig(
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        page_size=config.page_size,
        pool_pages=pool_pages,
        memory_fraction=config.memory_fraction,
        pool_bytes=None if config.pool_memory_mb is None else config.pool_memory_mb * MIB,
        max_context=config.max_context,
        table_rows=config.max_running,
        prefill_attention=config.prefill_attention,
        threads=config.threads,
        load_format=config.load_format,
    )


@contextmanager
def starting_on(device: str) -> Iterator[None]:
    """What building an engine in here comes to grief with leaves as a StartError of one line. Whatever else is raised is a
    mistake of ours and leaves as it is."""
    import torch

    check_device(device)
    try:
        yield
    except ModuleNotFoundError as error:
        if is_cuda(device) and error.name is not None and error.name.split(".")[0] in CUDA_MODULES:
            raise StartError(f"--device {device} needs {error.name}: pip install '.[cuda]'") from error
        raise
    except (RuntimeError, MemoryError) as error:
        first = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError):
            raise StartError(f"out of memory on {device}: {first.removeprefix('CUDA out of memory. ')}") from error
        if isinstance(error, MemoryError) or OUT_OF_CPU_MEMORY in first:
            raise StartError(f"out of memory: {first or 'the machine has no more'}") from error
        if is_cuda(device) and "CUDA" in first:
            raise StartError(f"{device}: {first}") from error
        raise


def check_device(device: str) -> None:
    """Raises StartError if torch has no such device."""
    if not is_cuda(device):
        return
    import torch

    if torch.version.cuda is None:
        raise StartError(f"--device {device}: torch {torch.__version__} is a build without CUDA")
    gpus = torch.cuda.device_count()
    if gpus == 0 or not torch.cuda.is_available():
        raise StartError(f"--device {device}: torch sees no GPU here")
    if (torch.device(device).index or 0) >= gpus:
        names = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise StartError(f"--device {device}: there is no such GPU here, only {names}")
