"""What both kinds of worker count, and the gauges that both have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from common.errors import PdserveError
from common.metrics import REGISTRY, gauge, record, register_gauges
from common.work import WorkerLoad


class WorkerMetrics:
    """Event loop only. Counting never fails its caller."""

    def __init__(self, *, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._computed = Counter("pdserve_prefill_tokens", "Prompt tokens computed.", registry=registry)
        self._cached = Counter("pdserve_prefix_cache_tokens", "Prompt tokens found in the prefix cache.", registry=registry)
        self._failures = Counter("pdserve_failures", "Attempts that failed here, by gRPC status.", ["code"], registry=registry)
        self._refusals = Counter("pdserve_refusals", "Work refused before it began.", ["reason"], registry=registry)
        self._computed_before = 0

    def watch(
        self,
        *,
        load: Callable[[], WorkerLoad],
        states: Callable[[], Mapping[str, int]],
        sessions: Callable[[], int],
        outbox: Callable[[], int],
    ) -> None:
        """Where the gauges are read from, by the scraping thread. states: requests by state. sessions: of routers. outbox:
        messages that wait to be sent to them."""

        def collect() -> Iterable[Metric]:
            yield from _load_gauges(load())
            yield gauge("pdserve_requests_by_state", "Requests here by state.", states(), "state")
            yield gauge("pdserve_sessions", "Routers with an open session.", sessions())
            yield gauge("pdserve_outbox_messages", "Messages that wait to be sent over the sessions.", outbox())

        register_gauges("worker", collect, self._registry)

    def computed(self, total: int) -> None:
        """total: prompt tokens computed since the start; the engine's running total becomes the counter's."""
        fresh, self._computed_before = total - self._computed_before, total
        if fresh:
            record(lambda: self._computed.inc(fresh))

    def found_cached(self, tokens: int) -> None:
        record(lambda: self._cached.inc(tokens))

    def failed(self, error: PdserveError) -> None:
        record(lambda: self._failures.labels(error.status.name).inc())

    def refused(self, error: PdserveError) -> None:
        record(lambda: self._refusals.labels(error.reason).inc())


def _load_gauges(load: WorkerLoad) -> Iterable[Metric]:
    pages = load.pages
    by_kind = {kind: getattr(pages, kind) for kind in ("free", "held", "cached", "quarantined")}
    yield gauge("pdserve_pages", "KV pages by who has them.", by_kind, "kind")
    yield gauge("pdserve_pool_pages", "KV pages in the pool.", pages.total)
    yield gauge("pdserve_running_requests", "Requests being computed.", load.running)
    yield gauge("pdserve_waiting_requests", "Requests queued, reserved or being received.", load.waiting)
    yield gauge("pdserve_queued_prefill_tokens", "Prompt tokens here and not yet computed.", load.queued_tokens)
    yield gauge("pdserve_draining", "1 while no new work is taken, for the worker is leaving.", load.draining)
