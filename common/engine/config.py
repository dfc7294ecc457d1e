"""EngineConfig: what an engine is built from, a worker's configuration without what is not the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.batch_sizes import BatchSizes
from common.worker_config import DecodeAttention, PrefillAttention


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """model: a Hugging Face folder.
    device: cpu or cuda:N.
    pool_pages: of the KV pool; None (CUDA only): as many as fit, see common/engine/memory.py.
    memory_fraction: of the GPU's total memory, what the worker may use in all; None on the CPU.
    pool_bytes: the pool's, at most; None: no such limit.
    max_context: tokens of one request; cut to the model's. None: the model's.
    chunk_tokens: most tokens of one prefill step, over all requests; 0: this engine computes no prompts.
    decodes: also, or only: the CPU's weights are laid out for few tokens at a time.
    table_rows: requests that may have a page table row at once.
    prefill_attention, decode_attention: "auto": what the device does best.
    graph_sizes: batch sizes of decode that are captured as CUDA graphs.
    threads: of torch within one operation; None: torch's default, one per core.
    load_format: "dummy" makes random weights of the config's shape and needs no weight files, for benchmarks.
    """

    model: Path
    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 16
    pool_pages: int | None
    memory_fraction: float | None = None
    pool_bytes: int | None = None
    max_context: int | None = None
    chunk_tokens: int = 0
    decodes: bool = True
    table_rows: int
    prefill_attention: PrefillAttention = "auto"
    decode_attention: DecodeAttention = "auto"
    graph_sizes: BatchSizes = BatchSizes()
    threads: int | None = None
    load_format: Literal["safetensors", "dummy"] = "safetensors"
