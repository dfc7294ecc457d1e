"""What a prefill worker counts, beside the gauges that all workers have (common/metrics.py)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from common.metrics import REGISTRY, record
from common.work import WorkFailure
from prefill_worker.events import Stats


class PrefillMetrics:
    """Event loop only. Counting never fails its caller."""

    def __init__(self, *, registry: CollectorRegistry = REGISTRY) -> None:
        self._computed = Counter("pdserve_prefill_tokens", "Prompt tokens computed.", registry=registry)
        self._handed_off = Counter("pdserve_handoffs", "Requests handed over, by transport.", ["transport"], registry=registry)
        self._failed = Counter(
            "pdserve_prefill_failures", "Attempts failed here, by gRPC status number.", ["code"], registry=registry
        )
        self._counted_tokens = 0

    def watch(self, stats: Stats) -> None:
        """The engine's running total becomes the counter's."""
        fresh, self._counted_tokens = stats.computed_tokens - self._counted_tokens, stats.computed_tokens
        record(lambda: self._computed.inc(fresh))

    def handed_off(self, transport: str) -> None:
        record(lambda: self._handed_off.labels(transport).inc())

    def failed(self, failure: WorkFailure) -> None:
        record(lambda: self._failed.labels(str(failure.code)).inc())
