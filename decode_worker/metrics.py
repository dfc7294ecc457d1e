"""What a decode worker counts, beside what all workers do (common/worker_metrics.py)."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from common.metrics import REGISTRY, record
from common.worker_metrics import WorkerMetrics
from decode_worker.events import Failed, HandedOver, PrefillStarted, Retracted, Stats, StepTokens

EXPOSED_BUCKETS = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)


class DecodeMetrics(WorkerMetrics):
    """Event loop only. Counting never fails its caller."""

    def __init__(self, *, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry=registry)
        self._exposed = Histogram(
            "pdserve_handoff_exposed_seconds",
            "From a prompt's last chunk, computed on this host, until the request may run here (cuda_ipc).",
            buckets=EXPOSED_BUCKETS,
            registry=registry,
        )
        self._tokens = Counter("pdserve_decode_tokens", "Tokens told to routers.", registry=registry)
        self._steps = Counter("pdserve_decode_steps", "Messages of a step's tokens, one per router.", registry=registry)
        self._commits = Counter("pdserve_commits", "Commits answered, by gRPC status.", ["code"], registry=registry)
        self._retracted = Counter(
            "pdserve_decode_retractions", "Requests given back to their routers.", ["cause"], registry=registry
        )

    def take(self, event: Any, *, draining: bool) -> None:
        """What the engine says, as far as it counts. Of a step its message, not its tokens one by one."""
        match event:
            case StepTokens():
                record(self._steps.inc)
                record(lambda: self._tokens.inc(len(event.tokens)))
            case Stats():
                self.computed(event.computed_tokens)
            case PrefillStarted():
                self.found_cached(event.cached_tokens)
            case HandedOver():
                record(lambda: self._exposed.observe(event.exposed_seconds))
            case Retracted():
                record(lambda: self._retracted.labels("leaving" if draining else "pages").inc())
            case Failed():
                self.failed(event.failure.error)

    def committed(self, code: str) -> None:
        """A Commit was answered. code: its gRPC status."""
        record(lambda: self._commits.labels(code).inc())
