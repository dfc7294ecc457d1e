"""Metrics over real HTTP, read at scrape time."""

import logging
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from common.errors import StartError
from common.metrics import record, register_load_gauges, register_page_gauges, start_metrics_server
from common.work import PageCounts, WorkerLoad


def scrape(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_gauges_show_the_values_of_the_moment_of_the_scrape() -> None:
    registry = CollectorRegistry()
    now = {"pages": PageCounts(5, 2, 1, 0, 8), "load": WorkerLoad(running=3, waiting=4)}
    register_page_gauges(lambda: now["pages"], registry=registry)  # type: ignore[arg-type,return-value]
    register_load_gauges(lambda: now["load"], registry=registry)  # type: ignore[arg-type,return-value]
    port = start_metrics_server(0, registry=registry)
    first = scrape(port)
    for line in ('pdserve_pages{kind="free"} 5.0', 'pdserve_pages{kind="held"} 2.0', 'pdserve_pages{kind="cached"} 1.0'):
        assert line in first
    for line in ('pdserve_pages{kind="quarantined"} 0.0', "pdserve_pages_total 8.0"):
        assert line in first
    assert "pdserve_running_requests 3.0" in first
    assert "pdserve_waiting_requests 4.0" in first
    now["load"] = WorkerLoad()
    assert "pdserve_running_requests 0.0" in scrape(port)


def test_a_reading_that_fails_leaves_the_other_metrics(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> PageCounts:
        raise RuntimeError("no pool")

    registry = CollectorRegistry()
    register_page_gauges(broken, registry=registry)
    register_load_gauges(WorkerLoad, registry=registry)
    text = scrape(start_metrics_server(0, registry=registry))
    assert "pdserve_running_requests 0.0" in text
    assert "pdserve_pages" not in text
    assert "the pages metrics could not be read" in caplog.text


def test_a_second_registration_takes_the_place_of_the_first() -> None:
    registry = CollectorRegistry()
    register_load_gauges(lambda: WorkerLoad(running=1), registry=registry)
    register_load_gauges(lambda: WorkerLoad(running=2), registry=registry)
    text = scrape(start_metrics_server(0, registry=registry))
    assert text.count("\npdserve_running_requests ") == 1
    assert "pdserve_running_requests 2.0" in text


def test_obs_03_an_impossible_update_is_logged_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter("tokens", "tokens", registry=CollectorRegistry())
    with caplog.at_level(logging.ERROR):
        record(lambda: counter.inc(-1))
    assert "a metric could not be updated" in caplog.text


def test_no_port_serves_nothing() -> None:
    assert start_metrics_server(None) is None


def test_a_taken_metrics_port_is_a_start_error_naming_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot serve metrics on 127.0.0.1:{port}: address already in use"):
            start_metrics_server(port)
