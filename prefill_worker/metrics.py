"""What a prefill worker counts, beside what all workers do (common/worker_metrics.py)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from common.metrics import REGISTRY, STAGE_BUCKETS, record
from common.worker_metrics import WorkerMetrics
from prefill_worker.trip import Mark, Trip

EXPOSED_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 20)


class PrefillMetrics(WorkerMetrics):
    """Event loop only. Counting never fails its caller."""

    def __init__(self, *, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["transport"], registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = STAGE_BUCKETS) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._handoffs = counter("pdserve_handoffs", "Requests handed over.")
        self._bytes = counter("pdserve_transfer_bytes", "KV bytes of requests handed over.")
        self._broken = counter("pdserve_transfer_failures", "Requests that failed between granted pages and their handover.")
        self._queue = histogram("pdserve_prefill_queue_seconds", "From a request's arrival until it has pages.")
        self._reserve = histogram("pdserve_reserve_seconds", "Wait for the decode worker's pages.")
        self._compute = histogram("pdserve_prefill_compute_seconds", "From then until the first tokens are made.")
        self._transfer = histogram("pdserve_transfer_seconds", "From granted pages until handed over.", "transport")
        self._exposed = histogram(
            "pdserve_transfer_exposed_seconds",
            "The part of it after the prompt was computed.",
            "transport",
            buckets=EXPOSED_BUCKETS,
        )

    def handed_over(self, trip: Trip, *, kv_bytes: int) -> None:
        record(lambda: self._handed_over(trip, str(trip.transport), kv_bytes))

    def traveled(self, trip: Trip, *, failed: bool) -> None:
        """One request has ended here; each stage that it completed is measured."""
        record(lambda: self._traveled(trip, failed))

    def _handed_over(self, trip: Trip, transport: str, kv_bytes: int) -> None:
        self._handoffs.labels(transport).inc()
        self._bytes.labels(transport).inc(kv_bytes)
        _observe(self._transfer.labels(transport), trip.seconds(Mark.RESERVED, Mark.HANDED_OVER))
        _observe(self._exposed.labels(transport), trip.seconds(Mark.COMPUTED, Mark.HANDED_OVER))

    def _traveled(self, trip: Trip, failed: bool) -> None:
        _observe(self._queue, trip.seconds(Mark.ARRIVED, Mark.ADMITTED))
        _observe(self._compute, trip.seconds(Mark.RESERVED, Mark.COMPUTED))
        if trip.transport is not None:
            _observe(self._reserve, trip.seconds(Mark.ADMITTED, Mark.RESERVED))
            if failed and trip.at(Mark.HANDED_OVER) is None:
                self._broken.labels(trip.transport).inc()


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
