"""From a loaded model to a CudaRunner: what is allocated on the card, in which order.

1. the weights, before this   2. attention's workspaces   3. the KV pool: what --memory-fraction leaves (common/engine/memory.py)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.engine.config import EngineConfig
from common.engine.cuda.attention import CudaAttention
from common.engine.cuda.attention_choice import choose_decode, choose_prefill, prefill_workspace
from common.engine.cuda.attention_kernels import FlashInferPrefill, Geometry, PrefillKernel
from common.engine.cuda.launch import is_power_of_2
from common.engine.cuda.page_table import CudaPageTable
from common.engine.cuda.prefill_graphs import Shape
from common.engine.cuda.runner import CudaRunner
from common.engine.cuda.warm_up import warm_up_prefill, warm_up_rows
from common.engine.kv_pool import KVPool
from common.engine.load import LoadedModel
from common.engine.memory import size_pool
from common.engine.pages import pages_for
from common.errors import StartError

GIB = 1 << 30
PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048)
"""Sizes of captured prefill steps. Beyond, the kernels of even a small model take longer than their launches."""
PREFILL_REQS = (1, 8)
GRAPHS_BYTES = 2 * GIB
"""For captured graphs and cuBLAS's workspaces: 35 batch sizes of an 8B model took 1.1 GiB."""


def build_cuda_runner(loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]) -> CudaRunner:
    """Makes a stream of its own the calling thread's current one: call it in the thread that will run the model."""
    _check_shapes(loaded, config)
    device = torch.device(config.device)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    shape = loaded.shape
    geometry = Geometry(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=config.page_size,
        dtype=loaded.dtype,
        device=device,
    )
    max_pages = config.table_rows * pages_for(loaded.compatibility.max_context, config.page_size)
    workspace = prefill_workspace(device)
    prefill = choose_prefill(config.prefill_attention, geometry, workspace)
    decode = choose_decode(config.decode_attention, geometry, max_pages=max_pages)
    pool = _pool(loaded, config, progress)
    table = CudaPageTable(
        config.table_rows,
        loaded.compatibility.max_context,
        page_size=config.page_size,
        dummy_page=pool.num_pages,
        device=device,
    )
    runner = CudaRunner(
        loaded,
        page_table=table,
        pool=pool,
        attention=CudaAttention(pool, prefill=prefill, decode=decode),
        max_tokens=config.chunk_tokens,
    )
    if config.chunk_tokens and isinstance(prefill, FlashInferPrefill):
        _capture_prefill(runner, config, geometry, workspace, progress)
    warm_up_prefill(runner)
    warm_up_rows(runner.sampling, table)
    return runner


def _capture_prefill(
    runner: CudaRunner,
    config: EngineConfig,
    geometry: Geometry,
    workspace: torch.Tensor,
    progress: Callable[[str], None],
) -> None:
    tokens = [size for size in PREFILL_TOKENS if size <= config.chunk_tokens]
    max_context = runner.compatibility.max_context

    def kernel(shape: Shape) -> PrefillKernel:
        # It is captured with one request of all the tokens, whatever the longest context is.
        pages = max(shape.reqs * pages_for(max_context, config.page_size), pages_for(shape.tokens, config.page_size))
        return choose_prefill(config.prefill_attention, geometry, workspace, captured_reqs=shape.reqs, max_pages=pages)

    runner.capture_prefill(kernel, [Shape(size, reqs) for size in tokens for reqs in PREFILL_REQS])
    progress(f"captured prefill steps of {tokens} tokens")


def _check_shapes(loaded: LoadedModel, config: EngineConfig) -> None:
    """Raises StartError for what the kernels do not serve."""
    head_dim = loaded.shape.head_dim
    if head_dim < 32 or not is_power_of_2(head_dim):
        raise StartError(
            f"{config.model}: head_dim must be a power of two from 32 on for --device {config.device}, got {head_dim}"
        )
    if not is_power_of_2(config.page_size):
        raise StartError(f"--page-size must be a power of two for --device {config.device}, got {config.page_size}")


def _pool(loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]) -> KVPool:
    each = loaded.page_bytes(config.page_size)
    activations = config.chunk_tokens * 2 * (4 * loaded.shape.hidden_size + 3 * loaded.shape.intermediate_size)
    rows = config.table_rows * (2 * loaded.shape.vocab_size + loaded.compatibility.max_context) * 4
    pages = size_pool(config, page_bytes=each, reserved_bytes=GRAPHS_BYTES + activations + rows + each)
    progress(f"KV pool: {pages} pages of {config.page_size} tokens, {pages * each / GIB:.1f} GiB")
    # One page more, which padding writes to.
    return KVPool(
        pages, page_size=config.page_size, dtype=loaded.dtype, device=config.device, spare_pages=1, **loaded.kv_geometry
    )
