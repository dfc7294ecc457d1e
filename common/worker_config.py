"""What both kinds of worker are configured with."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from common.address import Address, UnixAddress
from common.by_device import ByDevice, by_device, check_device_name, is_cuda, resolve
from common.config import option, required
from common.engine.threads import default_threads
from common.logs import LogFormat
from common.security_config import SecurityConfig
from common.tracing import check_endpoint

MIB = 1 << 20
MOST_PAGES = 1 << 24
MOST_RUNNING = 1 << 16
MOST_THREADS = 1 << 12
"""What is kept for each of them is made at the start: with more it would not end, or take all memory there is."""
PrefillAttention = Literal["auto", "flashinfer", "torch"]
DecodeAttention = Literal["auto", "triton", "xqa", "flashinfer", "torch"]
ENGINES = ("thread", "process", "sim")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(SecurityConfig):
    """See --help. Raises ValueError on values that cannot work."""

    model: Path = required("folder of the model")
    router: tuple[Address, ...] = option((), "a router to register with; repeatable")
    listen: Address = option(Address("127.0.0.1", 0), "where to serve; port 0 takes a free one")
    advertise: Address | None = option(None, "address that routers and peers reach this worker at, if not --listen's")
    device: str = option("cpu", "where to compute: cpu, cuda or cuda:N; cuda is cuda:0")
    engine: str = by_device(
        cpu="thread", cuda="process", help="what the engine runs in; sim: it only takes time", choices=ENGINES
    )
    dtype: str = by_device(
        cpu="float32", cuda="bfloat16", help="of weights, activations and KV", choices=("float32", "bfloat16", "float16")
    )
    page_size: int = by_device(cpu=16, cuda=64, help="tokens per KV page; the same on every worker")
    pool_pages: int | None = option(
        None, "pages in the KV pool; default: what --pool-memory-mb or --memory-fraction leaves room for"
    )
    pool_memory_mb: int | None = by_device(cpu=1024, cuda=None, help="MiB for the KV pool; on cuda: at most so many")
    memory_fraction: float | None = by_device(
        cpu=None,
        cuda=0.9,
        help="of the GPU's total memory, what this worker may use in all; the KV pool gets what the rest of it leaves",
    )
    max_context: int | None = option(None, "longest sequence in tokens; default: the model's")
    max_running: int = by_device(cpu=16, cuda=64, help="most requests worked on at once")
    prefill_attention: PrefillAttention = option("auto", "what prompts attend with; auto: what the device does best")
    threads: int = option(default_threads(), "threads that compute on the CPU; default: half the cores")
    load_format: Literal["safetensors", "dummy"] = option("safetensors", "dummy: random weights, for benchmarks")
    metrics_port: int | None = option(None, "port for Prometheus; 0 takes a free one; default: off")
    otlp_endpoint: str | None = option(
        None, "http(s)://HOST:PORT of an OTLP collector (gRPC) for traces; unset: OTEL_EXPORTER_OTLP_ENDPOINT, else none"
    )
    sim_profile: Path | None = option(None, "JSON file of how long a simulated engine takes; default: one H200, Llama-3-8B")
    time_scale: float = option(1.0, "simulated seconds per second (--engine sim)")
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: LogFormat = option("text", "how lines are written; json: an object a line")
    grace: timedelta = option(timedelta(seconds=30), "time to finish requests in when told to stop")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "device", check_device_name(self.device))
        if self.is_simulated and isinstance(self.memory_fraction, ByDevice):
            object.__setattr__(self, "memory_fraction", None)
        # What is simulated is a GPU unless the profile says otherwise, so its sizes are the defaults.
        resolve(self, "cuda:0" if self.is_simulated else self.device)
        self._check_positive("page_size", "pool_memory_mb", "pool_pages", "max_context", "max_running", "threads")
        if self.max_context == 1:
            raise ValueError("--max-context must be at least 2, a token of prompt and one of output, got 1")
        for name, most in (("pool_pages", MOST_PAGES), ("max_running", MOST_RUNNING), ("threads", MOST_THREADS)):
            if (value := getattr(self, name)) is not None and value > most:
                raise ValueError(f"--{name.replace('_', '-')} must be at most {most}, got {value}")
        if self.is_simulated:
            self._check_simulation()
        elif self.sim_profile is not None or self.time_scale != 1.0:
            raise ValueError(f"--sim-profile and --time-scale need --engine sim, got --engine {self.engine}")
        self._check_gpu_options()
        check_endpoint(self.otlp_endpoint)
        if self.listen.is_wildcard and self.advertise is None:
            raise ValueError(f"--advertise must be given when --listen is {self.listen}: peers cannot dial it")
        self._check_dialled("--advertise", self.advertise)
        self.check_listen(self.listen)
        for router in self.router:
            self._check_dialled("--router", router)
            self.check_dial(router, flag="--router")

    @property
    def on_cuda(self) -> bool:
        return is_cuda(self.device)

    @property
    def is_simulated(self) -> bool:
        """Schedules, pages and messages are real, the model and its KV are not; torch is not imported."""
        return self.engine == "sim"

    @property
    def shown_device(self) -> str:
        """Where routers are told that this worker computes."""
        return self.engine if self.is_simulated else self.device

    def pages_before_start(self, page_bytes: int) -> int | None:
        """Pages in the pool, given what one takes; None if only the started engine knows. Raises ValueError if none fits, or too
        many."""
        if self.pool_pages is not None or self.pool_memory_mb is None or self.on_cuda:
            return self.pool_pages
        pages = self.pool_memory_mb * MIB // page_bytes
        if pages < 1:
            raise ValueError(f"--pool-memory-mb must hold at least one page of {page_bytes} bytes, got {self.pool_memory_mb}")
        if pages > MOST_PAGES:
            raise ValueError(
                f"--pool-memory-mb must be {MOST_PAGES} pages of {page_bytes} bytes at most, got {self.pool_memory_mb}"
            )
        return pages

    def warn_of_no_router(self, log: logging.Logger) -> None:
        if not self.router:
            log.warning("no --router is given: this worker registers nowhere and gets no work")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    @staticmethod
    def _check_dialled(flag: str, address: Address | None) -> None:
        if address is not None and not isinstance(address, UnixAddress) and (address.port == 0 or address.is_wildcard):
            raise ValueError(f"{flag} must be an address that can be dialled, got {address}")

    def _check_simulation(self) -> None:
        if self.on_cuda:
            raise ValueError(f"--engine sim computes nowhere: leave --device out, got {self.device}")
        if not self.time_scale > 0:
            raise ValueError(f"--time-scale must be more than 0, got {self.time_scale:g}")
        if self.pool_memory_mb is not None:
            raise ValueError(f"--pool-memory-mb is for real engines: use --pool-pages, got {self.pool_memory_mb}")

    def _check_gpu_options(self) -> None:
        if (fraction := self.memory_fraction) is not None:
            if not self.on_cuda:
                raise ValueError(f"--memory-fraction is for --device cuda; on {self.device} use --pool-memory-mb")
            if not 0 < fraction <= 1:
                raise ValueError(f"--memory-fraction must be in (0, 1], got {fraction:g}")
        self._check_needs_cuda("prefill_attention")

    def _check_needs_cuda(self, name: str) -> None:
        """An attention backend other than torch's is for GPUs."""
        if not self.on_cuda and (value := getattr(self, name)) not in ("auto", "torch"):
            raise ValueError(f"--{name.replace('_', '-')} {value} needs --device cuda, got {self.device}")
