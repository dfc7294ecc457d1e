"""A decode worker's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from common.batch_sizes import BatchSizes
from common.by_device import by_device
from common.config import option
from common.worker_config import DecodeAttention, WorkerConfig

UP_TO_MAX_RUNNING = "1,2,4,8,16,24,... up to --max-running"
"""What --help says; once the config is made, BatchSizes.up_to(max_running)."""


@dataclass(frozen=True, kw_only=True)
class Config(WorkerConfig):
    """See --help. Raises ValueError on values that cannot work."""

    max_running: int = by_device(cpu=64, cuda=256, help="most completions in one decode step")
    decode_attention: DecodeAttention = option("auto", "what decode steps attend with; auto: what the device does best")
    graph_sizes: BatchSizes = by_device(
        cpu=BatchSizes(),
        cuda=UP_TO_MAX_RUNNING,
        help="batch sizes to capture a CUDA graph for, with commas between; --max-running is one in any case; none: no graphs",
    )
    lease: timedelta = option(timedelta(seconds=10), "how long granted pages wait for their KV without a sign of the sender")
    local_prefill: Literal["never", "short", "always"] = option(
        "never",
        "always: take requests alone, computing their prompts between the decode steps; short: only those with few tokens to "
        "compute, while the prefill workers are busy",
    )
    local_prefill_tokens: int = option(256, "fewer tokens to compute than this are few, for --local-prefill short")
    chunk_tokens: int = by_device(cpu=256, cuda=2048, help="most prompt tokens computed in one step (local prefill)")
    max_requests: int = option(10_000, "most prompts here at once, those in line included (local prefill)")
    request_timeout: timedelta = option(
        timedelta(minutes=10), "longest wait for the first token of a request whose client set no deadline (local prefill)"
    )
    shm: bool = option(
        True, "let prefill workers of this host and user write KV through shared memory, if the pool is on the CPU"
    )
    cuda_ipc: bool = option(True, "let prefill workers of this host and user store KV from their GPUs, if the pool is on one")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_needs_cuda("decode_attention")
        self._settle_graph_sizes()
        self._check_positive("chunk_tokens", "max_requests", "local_prefill_tokens")
        if self.lease < timedelta(milliseconds=100):
            raise ValueError(f"--lease must be at least 100ms, got {self.lease.total_seconds():g}s")
        if self.request_timeout <= timedelta(0):
            raise ValueError(f"--request-timeout must be more than 0, got {self.request_timeout}")

    @property
    def prefills(self) -> bool:
        """Prompts, at least some."""
        return self.local_prefill != "never"

    def _settle_graph_sizes(self) -> None:
        if not isinstance(self.graph_sizes, BatchSizes):
            sizes = BatchSizes() if self.is_simulated else BatchSizes.up_to(self.max_running)
            object.__setattr__(self, "graph_sizes", sizes)
        if self.graph_sizes and not self.on_cuda:
            raise ValueError(f"--graph-sizes needs --device cuda, got {self.device}")
        if self.graph_sizes and self.graph_sizes[-1] > self.max_running:
            raise ValueError(
                f"--graph-sizes must be at most --max-running, which is {self.max_running}, got {self.graph_sizes[-1]}"
            )
