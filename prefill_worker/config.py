"""A prefill worker's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from common.address import Address
from common.config import option, required
from common.engine.threads import default_threads
from common.handoff.choose import TransportMode

_LOOPBACK = Address("127.0.0.1", 0)


@dataclass(frozen=True)
class Config:
    """See --help. Raises ValueError on values that cannot work."""

    model: Path = required("folder of the model")
    router: tuple[Address, ...] = option((), "a router to register with; repeatable")
    listen: Address = option(_LOOPBACK, "where to serve; port 0 takes a free one")
    advertise: Address | None = option(None, "address that routers and peers reach this worker at, if not --listen's")
    device: str = option("cpu", "where to compute", choices=("cpu",))
    dtype: str = option("float32", "of weights, activations and KV", choices=("float32", "bfloat16"))
    page_size: int = option(16, "tokens per KV page; the same on every worker")
    pool_pages: int | None = option(None, "pages in the KV pool; default: what --pool-memory-mb holds")
    pool_memory_mb: int = option(1024, "MiB for the KV pool, if --pool-pages is not given")
    max_context: int | None = option(None, "longest sequence in tokens; default: the model's")
    max_running: int = option(16, "most requests that hold pages here at once")
    max_requests: int = option(10_000, "most requests here at once, those in line included")
    chunk_tokens: int = option(256, "most tokens computed in one step, over all requests")
    transport: TransportMode = option("auto", "how KV goes to a decode worker; auto: shm on the same host, else grpc")
    verify_handoff: bool = option(False, "check every page sent with a CRC-32")
    transfer_timeout: timedelta = option(timedelta(seconds=20), "longest stall of a KV transfer, and wait for a commit")
    request_timeout: timedelta = option(timedelta(minutes=10), "longest stay of a request whose client set no deadline")
    threads: int = option(default_threads(), "threads that compute on the CPU; default: half the cores")
    load_format: Literal["safetensors", "dummy"] = option("safetensors", "dummy: random weights, for benchmarks")
    metrics_port: int | None = option(None, "port for Prometheus; 0 takes a free one; default: off")
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    grace: timedelta = option(timedelta(seconds=30), "time to finish requests in when told to stop")

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "pool_memory_mb",
            "max_running",
            "max_requests",
            "chunk_tokens",
            "pool_pages",
            "max_context",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("transfer_timeout", "request_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.listen.host in ("0.0.0.0", "::") and self.advertise is None:
            raise ValueError(f"advertise must be given when listen is a wildcard, got listen {self.listen}")
