"""What the router counts. Whatever goes wrong in here is logged and never reaches the code that is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import REGISTRY, record

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5)


class RouterMetrics:
    """One set per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        own: dict[str, Any] = {"registry": registry}
        self._in_flight = Gauge("pdserve_requests_in_flight", "Requests let in and not ended.", **own)
        self._queued = Gauge("pdserve_requests_queued", "Requests let in and without their first token.", **own)
        self._work = Gauge("pdserve_completions_on_workers", "Completions some worker has a part of.", **own)
        self._requests = Counter("pdserve_requests", "Ended requests.", ["outcome"], **own)
        self._tokens = Counter("pdserve_tokens", "Tokens of ended requests.", ["kind"], **own)
        self._ttft = Histogram("pdserve_ttft_seconds", "From arrival to the first token.", buckets=TTFT_BUCKETS, **own)
        self._gap = Histogram("pdserve_token_gap_seconds", "Mean time between the tokens of a delta.", buckets=GAP_BUCKETS, **own)
        self._begun = Counter("pdserve_attempts", "Attempts begun.", **own)
        self._failed = Counter("pdserve_attempt_failures", "Attempts that failed.", **own)
        self._retracted = Counter("pdserve_retractions", "Requests a decode worker handed back for want of pages.", **own)

    def watch(self, *, in_flight: Callable[[], int], queued: Callable[[], int], on_workers: Callable[[], int]) -> None:
        """Where the gauges are read from, at scrape time."""
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
        record(lambda: self._gap.observe(seconds))

    def attempt_begun(self) -> None:
        record(self._begun.inc)

    def attempt_failed(self) -> None:
        record(self._failed.inc)

    def retracted(self) -> None:
        record(self._retracted.inc)
