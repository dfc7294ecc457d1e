"""The router's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from common.address import Address
from common.config import option, required
from common.logs import LogFormat
from common.rpc.channels import PEER_SILENCE, check_silence
from common.security_config import SECURITY, SecurityConfig
from common.tracing import check_endpoint
from router.caller import check_key
from router.fleet.policies import PolicyName


@dataclass(frozen=True, kw_only=True)
class RouterConfig(SecurityConfig):
    model: Path = required("folder of the model: its tokenizer, chat template and limits; the weights are not loaded")
    listen: Address = option(Address("127.0.0.1", 50051), "address of the gRPC server; port 0 takes any free one")
    max_context: int | None = option(None, "prompt and output together at most, in tokens; unset: what the model allows")
    max_prompt_tokens: int | None = option(None, "a prompt at most, in tokens; unset: what --max-context leaves")
    max_queue: int = option(1024, "requests that may wait for their first token; one more is refused")
    max_in_flight: int = option(4096, "requests that may be in the router at once; one more is refused")
    max_attempts: int = option(5, "how often work on a request may fail, with little progress between, before its call fails")
    pair_wait: timedelta = option(
        timedelta(seconds=3), "how long a request waits while there is no pair of workers for it, and none is known to come"
    )
    policy: PolicyName = option("prefix", "how workers are chosen for a request (docs/decisions/0014)")
    session_key: str = option("x-session-id", "metadata key that names a request's session, for --policy session")
    tenant_key: str = option(
        "x-tenant-id", "metadata key that names whose request it is: tenants share the prefill workers evenly"
    )
    queue_tokens: int | None = option(
        None, "prompt tokens a prefill worker should have to compute; more wait here; unset: two of its steps, at least 2048"
    )
    local_prefill_queue: int = option(
        2048, "prompt tokens every prefill worker must have to compute before short prompts go to decode workers that take them"
    )
    queue_wait: timedelta = option(timedelta(minutes=10), "how long a request waits for a worker with room, at most")
    return_wait: timedelta = option(
        timedelta(seconds=30),
        "--pair-wait while a worker is starting, or one that left in order, or fell silent under the request, may come back",
    )
    peer_silence: timedelta = option(PEER_SILENCE, "a worker that answers no ping for so long loses its session and its work")
    worker_silence: timedelta = option(timedelta(seconds=5), "a worker that reports nothing for so long is taken for lost")
    grace: timedelta = option(timedelta(seconds=30), "time for running requests to finish in when the router is stopped")
    slow_client_timeout: timedelta = option(
        timedelta(minutes=1), "a client that reads nothing for so long has its call ended, RESOURCE_EXHAUSTED"
    )
    metrics_port: int | None = option(None, "port of the Prometheus metrics on 127.0.0.1; unset: none")
    otlp_endpoint: str | None = option(
        None, "http(s)://HOST:PORT of an OTLP collector (gRPC) for traces; unset: OTEL_EXPORTER_OTLP_ENDPOINT, else none"
    )
    log_level: str = option("info", "what to log", choices=("debug", "info", "warning", "error"))
    log_format: LogFormat = option("text", "how lines are written; json: an object a line")
    log_prompts: bool = option(False, "log every prompt; without, no prompt or output is ever logged")
    auth_token_file: Path | None = option(None, "tokens of clients; unset: clients need none", group=SECURITY)
    operator_token_file: Path | None = option(
        None,
        "tokens of operators, who alone flush caches and drain workers; unset: whoever has a client's, a worker's token",
        group=SECURITY,
    )
    max_calls_per_client: int | None = option(
        None, "calls that one client may have open, by its token or else its host; unset: no limit of its own", group=SECURITY
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_listen(self.listen, has_clients=True, client_tokens=self.auth_token_file)
        for name in ("max_queue", "max_in_flight", "max_attempts", "max_calls_per_client", "max_prompt_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"--max-context must be at least 2, got {self.max_context}")
        if self.queue_tokens is not None and self.queue_tokens < 1:
            raise ValueError(f"--queue-tokens must be at least 1, got {self.queue_tokens}")
        if self.local_prefill_queue < 0:
            raise ValueError(f"--local-prefill-queue must be at least 0, got {self.local_prefill_queue}")
        if self.queue_wait <= timedelta(0):
            raise ValueError(f"--queue-wait must be more than 0, got {self.queue_wait}")
        if self.slow_client_timeout < timedelta(milliseconds=100):
            raise ValueError(f"--slow-client-timeout must be at least 100ms, got {self.slow_client_timeout.total_seconds():g}s")
        check_endpoint(self.otlp_endpoint)
        check_key("--session-key", self.session_key)
        check_key("--tenant-key", self.tenant_key)
        check_silence(self.peer_silence)
        if self.worker_silence < timedelta(seconds=2):
            seconds = self.worker_silence.total_seconds()
            raise ValueError(f"--worker-silence must be at least 2s, for workers report every 500 ms, got {seconds:g}s")
