"""A decode worker's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from common.config import option
from common.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Config(WorkerConfig):
    """See --help. Raises ValueError on values that cannot work."""

    max_running: int = option(64, "most completions in one decode step")
    lease: timedelta = option(timedelta(seconds=10), "how long granted pages wait for their KV without a sign of the sender")
    shm: bool = option(True, "let prefill workers of this host and user write KV through shared memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lease < timedelta(milliseconds=100):
            raise ValueError(f"--lease must be at least 100ms, got {self.lease.total_seconds():g}s")
