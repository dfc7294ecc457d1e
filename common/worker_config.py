"""What both kinds of worker are configured with."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from common.address import Address
from common.config import option, required
from common.engine.threads import default_threads

MIB = 1 << 20
ENGINES = ("thread", "process")
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """See --help. Raises ValueError on values that cannot work."""

    model: Path = required("folder of the model")
    router: tuple[Address, ...] = option((), "a router to register with; repeatable")
    listen: Address = option(Address("127.0.0.1", 0), "where to serve; port 0 takes a free one")
    advertise: Address | None = option(None, "address that routers and peers reach this worker at, if not --listen's")
    device: str = option("cpu", "where to compute", choices=("cpu",))
    engine: str | None = option(None, "what the engine runs in; default: a thread on cpu, else a process", choices=ENGINES)
    dtype: str = option("float32", "of weights, activations and KV", choices=("float32", "bfloat16"))
    page_size: int = option(16, "tokens per KV page; the same on every worker")
    pool_pages: int | None = option(None, "pages in the KV pool; default: what --pool-memory-mb holds")
    pool_memory_mb: int = option(1024, "MiB for the KV pool, if --pool-pages is not given")
    max_context: int | None = option(None, "longest sequence in tokens; default: the model's")
    max_running: int = option(16, "most requests worked on at once")
    threads: int = option(default_threads(), "threads that compute on the CPU; default: half the cores")
    load_format: Literal["safetensors", "dummy"] = option("safetensors", "dummy: random weights, for benchmarks")
    metrics_port: int | None = option(None, "port for Prometheus; 0 takes a free one; default: off")
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    grace: timedelta = option(timedelta(seconds=30), "time to finish requests in when told to stop")

    def __post_init__(self) -> None:
        self._check_positive("page_size", "pool_memory_mb", "pool_pages", "max_context", "max_running", "threads")
        if self.listen.host in _WILDCARDS and self.advertise is None:
            raise ValueError(f"--advertise must be given when --listen is {self.listen}: peers cannot dial it")

    @property
    def engine_kind(self) -> str:
        """thread or process."""
        return self.engine or ("thread" if self.device == "cpu" else "process")

    def pages_of(self, page_bytes: int) -> int:
        """Pages in the pool, given what one takes. Raises ValueError if not even one fits."""
        pages = self.pool_memory_mb * MIB // page_bytes if self.pool_pages is None else self.pool_pages
        if pages < 1:
            raise ValueError(f"--pool-memory-mb must hold at least one page of {page_bytes} bytes, got {self.pool_memory_mb}")
        return pages

    def warn_of_no_router(self, log: logging.Logger) -> None:
        if not self.router:
            log.warning("no --router is given: this worker registers nowhere and gets no work")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
