"""A prefill worker's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from common.by_device import by_device
from common.config import option
from common.handoff.choose import TransportMode
from common.rpc.channels import PEER_SILENCE, check_silence
from common.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Config(WorkerConfig):
    """See --help. Raises ValueError on values that cannot work."""

    max_running: int = by_device(cpu=16, cuda=64, help="most requests that hold pages here at once")
    max_requests: int = option(10_000, "most requests here at once, those in line included")
    chunk_tokens: int = by_device(cpu=256, cuda=8192, help="most tokens computed in one step, over all requests")
    transport: TransportMode = option("auto", "how KV goes to a decode worker; auto: the first of the others that works with it")
    verify_handoff: bool = option(False, "check every page sent with a CRC-32")
    transfer_timeout: timedelta = option(timedelta(seconds=10), "longest stall of a KV transfer, and wait for a commit")
    peer_silence: timedelta = option(PEER_SILENCE, "a decode worker that answers no ping for so long is taken for gone")
    request_timeout: timedelta = option(timedelta(minutes=10), "longest stay of a request whose client set no deadline")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("max_requests", "chunk_tokens")
        if self.is_simulated:
            if self.transport not in ("auto", "sim"):
                raise ValueError(f"--transport must be sim or auto with --engine sim, got {self.transport}")
            object.__setattr__(self, "transport", "sim")
        elif self.transport == "sim":
            raise ValueError("--transport sim needs --engine sim: it moves no KV")
        if self.transport == "shm" and self.on_cuda:
            raise ValueError(f"--transport shm is for --device cpu; on {self.device} use cuda_ipc, grpc or auto")
        check_silence(self.peer_silence)
        for name in ("transfer_timeout", "request_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(self, name)}")
