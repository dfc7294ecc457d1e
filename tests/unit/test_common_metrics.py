"""Metrics over real HTTP, read at scrape time."""

import itertools
import logging
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from common import metrics
from common.errors import StartError
from common.metrics import gauge, record, register_gauges, start_metrics_server
from common.version import VERSION
from common.work import PageCounts, WorkerLoad
from common.worker_metrics import WorkerMetrics


def scrape(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


class Watched(WorkerMetrics):
    """A worker's metrics with a load that the test sets."""

    def __init__(self, registry: CollectorRegistry, load: WorkerLoad) -> None:
        super().__init__(registry=registry)
        self.load = load
        self.watch(load=lambda: self.load, states=lambda: {"queued": 4}, sessions=lambda: 1, outbox=lambda: 0)


def test_gauges_show_the_values_of_the_moment_of_the_scrape() -> None:
    registry = CollectorRegistry()
    worker = Watched(registry, WorkerLoad(3, 4, queued_tokens=9, pages=PageCounts(5, 2, 1, 0, 8)))
    port = start_metrics_server(0, role="decode", registry=registry)
    first = scrape(port)
    for line in ('pdserve_pages{kind="free"} 5.0', 'pdserve_pages{kind="held"} 2.0', 'pdserve_pages{kind="cached"} 1.0'):
        assert line in first
    for line in ('pdserve_pages{kind="quarantined"} 0.0', "pdserve_pool_pages 8.0", "pdserve_queued_prefill_tokens 9.0"):
        assert line in first
    for line in ("pdserve_running_requests 3.0", "pdserve_waiting_requests 4.0", "pdserve_draining 0.0", "pdserve_sessions 1.0"):
        assert line in first
    assert 'pdserve_requests_by_state{state="queued"} 4.0' in first
    assert f'pdserve_info{{role="decode",version="{VERSION}"}} 1.0' in first
    worker.load = WorkerLoad()
    assert "pdserve_running_requests 0.0" in scrape(port)


def test_obs_03_a_reading_that_fails_leaves_the_other_metrics(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    register_gauges("pages", lambda: [gauge("pdserve_pages", "", 1 / 0)], registry)
    register_gauges("other", lambda: [gauge("pdserve_other", "", 2)], registry)
    text = scrape(start_metrics_server(0, role="router", registry=registry))
    assert "pdserve_other 2.0" in text
    assert "pdserve_pages" not in text
    assert "the pages metrics could not be read" in caplog.text


def test_a_second_registration_takes_the_place_of_the_first() -> None:
    registry = CollectorRegistry()
    for value in (1, 2):
        register_gauges("load", lambda value=value: [gauge("pdserve_load", "", value)], registry)  # type: ignore[misc]
    text = scrape(start_metrics_server(0, role="router", registry=registry))
    assert text.count("\npdserve_load ") == 1
    assert "pdserve_load 2.0" in text


@pytest.fixture(autouse=True)
def no_complaints_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_complaints", itertools.count(1))


def test_obs_03_an_impossible_update_is_logged_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter("tokens", "tokens", registry=CollectorRegistry())
    with caplog.at_level(logging.ERROR):
        record(lambda: counter.inc(-1))
    assert "a metric could not be updated" in caplog.text


def test_a_metric_that_always_fails_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(metrics.COMPLAINTS + 5):
        record(lambda: 1 / 0)
    assert len(caplog.records) == metrics.COMPLAINTS


def test_no_port_serves_nothing() -> None:
    assert start_metrics_server(None, role="router") is None


def test_a_taken_metrics_port_is_a_start_error_naming_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot serve metrics on 127.0.0.1:{port}: address already in use"):
            start_metrics_server(port, role="router")


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_metrics_port_that_is_none_is_a_start_error_naming_rule_and_value(port: int) -> None:
    with pytest.raises(StartError, match=rf"--metrics-port must be in \[0, 65535\], got {port}"):
        start_metrics_server(port, role="router")
