"""A decode worker's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from common.config import option
from common.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Config(WorkerConfig):
    """See --help. Raises ValueError on values that cannot work."""

    max_running: int = option(64, "most completions in one decode step")
    lease: timedelta = option(timedelta(seconds=10), "how long granted pages wait for their KV without a sign of the sender")
    local_prefill: Literal["never", "always"] = option(
        "never", "always: take requests alone, computing their prompts between the decode steps"
    )
    chunk_tokens: int = option(256, "most prompt tokens computed in one step (local prefill)")
    max_requests: int = option(10_000, "most prompts here at once, those in line included (local prefill)")
    request_timeout: timedelta = option(
        timedelta(minutes=10), "longest wait for the first token of a request whose client set no deadline (local prefill)"
    )
    shm: bool = option(True, "let prefill workers of this host and user write KV through shared memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("chunk_tokens", "max_requests")
        if self.lease < timedelta(milliseconds=100):
            raise ValueError(f"--lease must be at least 100ms, got {self.lease.total_seconds():g}s")
        if self.request_timeout <= timedelta(0):
            raise ValueError(f"--request-timeout must be more than 0, got {self.request_timeout}")

    @property
    def prefills(self) -> bool:
        return self.local_prefill == "always"
