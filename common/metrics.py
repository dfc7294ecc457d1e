"""Prometheus metrics: one registry per process, served over HTTP on loopback when a port is given (docs/observability.md).

Gauges are read at the time of a scrape, so nothing can forget to update them. Whatever goes wrong in here is logged and never
reaches the code that is measured (OBS-03).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import StartError
from common.version import VERSION

disable_created_metrics()  # type: ignore[no-untyped-call]  # A second family beside every counter and histogram, of no use here.

REGISTRY = CollectorRegistry()
STAGE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Seconds that one stage of a request may take: from a short prompt's on a GPU to a long queue's."""
COMPLAINTS: Final = 10
"""Failed updates that are logged; a metric that fails once tends to fail with every request."""

_complaints = itertools.count(1)
log = logging.getLogger(__name__)


def start_metrics_server(port: int | None, *, role: str, registry: CollectorRegistry = REGISTRY) -> int | None:
    """Serves the registry on 127.0.0.1:port; 0: any free port, None serves nothing. Returns the bound port. Raises StartError."""
    if port is None:
        return None
    if not 0 <= port <= 65535:
        raise StartError(f"--metrics-port must be in [0, 65535], got {port}")
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise StartError(f"cannot serve metrics on 127.0.0.1:{port}: {(error.strerror or str(error)).lower()}") from error
    ProcessCollector(namespace="pdserve", registry=registry)
    register_gauges("process", lambda: [gauge("pdserve_info", "Always 1.", {(role, VERSION): 1}, "role", "version")], registry)
    return int(server.server_port)


def gauge(name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> GaugeMetricFamily:
    """One gauge's samples: a value, or one per label value (with several labels, per tuple of them)."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric(of if isinstance(of, tuple) else (of,), value)
    return family


def record(update: Callable[[], object]) -> None:
    """Runs a metric update; an error in it is logged and goes no further: record(lambda: counter.inc(n))."""
    try:
        update()
    except Exception:
        complain("a metric could not be updated")


def complain(text: str) -> None:
    """Within an except block: logs the exception, unless there were too many already."""
    if (number := next(_complaints)) <= COMPLAINTS:
        log.exception("%s%s", text, " (no more of these are logged)" if number == COMPLAINTS else "")


_registered: dict[tuple[CollectorRegistry, str], _Reader] = {}


def register_gauges(name: str, collect: Callable[[], Iterable[Metric]], registry: CollectorRegistry = REGISTRY) -> None:
    """collect is called by the scraping thread; what it raises leaves its metrics out of that scrape.

    A later registration of a name takes the earlier one's place: tests run several workers in one process."""
    if (earlier := _registered.get((registry, name))) is not None:
        registry.unregister(earlier)
    _registered[registry, name] = reader = _Reader(name, collect)
    registry.register(reader)


def forget_gauges(registry: CollectorRegistry) -> None:
    """For a registry that goes before its process does: what was registered with it is not kept any longer."""
    for key in [key for key in _registered if key[0] is registry]:
        registry.unregister(_registered.pop(key))


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
            complain(f"the {self._name} metrics could not be read")
            return []
