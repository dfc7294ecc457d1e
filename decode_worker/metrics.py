"""What a decode worker counts, beside the gauges that all workers have (common/metrics.py)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from common.metrics import REGISTRY, record

EXPOSED_BUCKETS = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)


class DecodeMetrics:
    """Event loop only. Counting never fails its caller."""

    def __init__(self, *, registry: CollectorRegistry = REGISTRY) -> None:
        self._exposed = Histogram(
            "pdserve_handoff_exposed_seconds",
            "From a prompt's last chunk, computed on this host, until the request may run here (cuda_ipc).",
            buckets=EXPOSED_BUCKETS,
            registry=registry,
        )

    def handed_over(self, exposed_seconds: float) -> None:
        record(lambda: self._exposed.observe(exposed_seconds))
