"""Prometheus metrics: one registry per process, served over HTTP on loopback when a port is given.

Gauges are read at the time of a scrape, so nothing can forget to update them. Whatever goes wrong in here is logged and never
reaches the code that is measured (OBS-03).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import StartError
from common.work import PageCounts, WorkerLoad

REGISTRY = CollectorRegistry()
log = logging.getLogger(__name__)


def start_metrics_server(port: int | None, *, registry: CollectorRegistry = REGISTRY) -> int | None:
    """Serves the registry on 127.0.0.1:port; 0: any free port, None serves nothing. Returns the bound port. Raises StartError."""
    if port is None:
        return None
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise StartError(f"cannot serve metrics on 127.0.0.1:{port}: {(error.strerror or str(error)).lower()}") from error
    return int(server.server_port)


def register_page_gauges(counts: Callable[[], PageCounts], *, registry: CollectorRegistry = REGISTRY) -> None:
    """pdserve_pages{kind} and pdserve_pages_total. counts is called by the scraping thread."""

    def collect() -> Iterable[Metric]:
        now = counts()
        pages = GaugeMetricFamily("pdserve_pages", "KV pages by who has them.", labels=["kind"])
        for kind in ("free", "held", "cached", "quarantined"):
            pages.add_metric([kind], getattr(now, kind))
        yield pages
        yield GaugeMetricFamily("pdserve_pages_total", "KV pages in the pool.", value=now.total)

    _register("pages", collect, registry)


def register_load_gauges(load: Callable[[], WorkerLoad], *, registry: CollectorRegistry = REGISTRY) -> None:
    """pdserve_running_requests and pdserve_waiting_requests. load is called by the scraping thread."""

    def collect() -> Iterable[Metric]:
        now = load()
        yield GaugeMetricFamily("pdserve_running_requests", "Requests being computed.", value=now.running)
        yield GaugeMetricFamily("pdserve_waiting_requests", "Requests queued, reserved or being received.", value=now.waiting)

    _register("load", collect, registry)


def record(update: Callable[[], object]) -> None:
    """Runs a metric update; an error in it is logged and goes no further: record(lambda: counter.inc(n))."""
    try:
        update()
    except Exception:
        log.exception("a metric could not be updated")


_registered: dict[tuple[CollectorRegistry, str], _Reader] = {}


def _register(name: str, collect: Callable[[], Iterable[Metric]], registry: CollectorRegistry) -> None:
    """A later registration takes the earlier one's place: tests run several workers in one process."""
    if (earlier := _registered.get((registry, name))) is not None:
        registry.unregister(earlier)
    _registered[registry, name] = reader = _Reader(name, collect)
    registry.register(reader)


class _Reader(Collector):
    """Reads values at scrape time; a reading that fails leaves its metrics out of this scrape."""

    def __init__(self, name: str, collect: Callable[[], Iterable[Metric]]) -> None:
        self._name = name
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        return []  # Else registering would already read the values.

    def collect(self) -> Iterable[Metric]:
        try:
            return list(self._collect())
        except Exception:
            log.exception("the %s metrics could not be read", self._name)
            return []
