"""What the router counts. Whatever goes wrong in here is logged and never reaches the code that is measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics import REGISTRY, record
from common.work import Role

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5)


class RouterMetrics:
    """One set per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        own: dict[str, Any] = {"registry": registry}
        self._in_flight = Gauge("pdserve_requests_in_flight", "Requests let in and not ended.", **own)
        self._queued = Gauge("pdserve_requests_queued", "Requests let in and without their first token.", **own)
        self._work = Gauge("pdserve_completions_on_workers", "Completions some worker has a part of.", **own)
        self._ready = Gauge("pdserve_ready_workers", "Workers that take work from this router.", ["role"], **own)
        self._requests = Counter("pdserve_requests", "Ended requests.", ["outcome"], **own)
        self._tokens = Counter("pdserve_tokens", "Tokens of ended requests.", ["kind"], **own)
        self._ttft = Histogram("pdserve_ttft_seconds", "From arrival to the first token.", buckets=TTFT_BUCKETS, **own)
        self._gap = _HotHistogram("pdserve_token_gap_seconds", "Mean time between the tokens of a delta.", GAP_BUCKETS)
        registry.register(self._gap)
        self._begun = Counter("pdserve_attempts", "Attempts begun.", **own)
        self._failed = Counter("pdserve_attempt_failures", "Attempts that failed.", **own)
        self._retracted = Counter("pdserve_retractions", "Requests a decode worker handed back for want of pages.", **own)

    def watch(
        self,
        *,
        in_flight: Callable[[], int],
        queued: Callable[[], int],
        on_workers: Callable[[], int],
        ready: Callable[[Role], int],
    ) -> None:
        """Where the gauges are read from, at scrape time. ready: how many workers of a role take work."""
        self._ready.labels("prefill").set_function(lambda: ready("prefill"))
        self._ready.labels("decode").set_function(lambda: ready("decode"))
        self._in_flight.set_function(in_flight)
        self._queued.set_function(queued)
        self._work.set_function(on_workers)

    def request_ended(self, outcome: str, *, prompt_tokens: int, output_tokens: int) -> None:
        """outcome: "OK" or the status's name."""

        def update() -> None:
            self._requests.labels(outcome).inc()
            self._tokens.labels("prompt").inc(prompt_tokens)
            self._tokens.labels("output").inc(output_tokens)

        record(update)

    def first_token(self, seconds: float) -> None:
        record(lambda: self._ttft.observe(seconds))

    def token_gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def attempt_begun(self) -> None:
        record(self._begun.inc)

    def attempt_failed(self) -> None:
        record(self._failed.inc)

    def retracted(self) -> None:
        record(self._retracted.inc)


class _HotHistogram(Collector):
    """A histogram for the path of every token: the event loop adds numbers, and only a scrape makes a metric of them."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        counts, total, rows = list(self._counts), 0, []
        for bound, count in zip((*map(str, self._buckets), "+Inf"), counts, strict=True):
            total += count
            rows.append((bound, total))
        yield HistogramMetricFamily(self._name, self._text, buckets=rows, sum_value=self._sum)
