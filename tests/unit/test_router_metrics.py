"""What the router counts."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from router.metrics import RouterMetrics

pytestmark = pytest.mark.unit


def test_token_gaps_are_scraped_as_a_cumulative_histogram() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for seconds in (0.0005, 0.004, 0.005, 99.0):
        metrics.sent(1, gap_seconds=seconds)

    def bucket(bound: str) -> float | None:
        return registry.get_sample_value("pdserve_token_gap_seconds_bucket", {"le": bound})

    assert [bucket(bound) for bound in ("0.001", "0.0025", "0.005", "5", "+Inf")] == [1, 1, 3, 3, 4]
    assert registry.get_sample_value("pdserve_token_gap_seconds_count") == 4
    assert registry.get_sample_value("pdserve_token_gap_seconds_sum") == pytest.approx(99.0095)


def test_a_metric_that_breaks_stops_nothing_obs_03(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    with monkeypatch.context() as broken:
        broken.setattr(Counter, "inc", lambda *_: 1 / 0)
        metrics.retracted()
    assert "a metric could not be updated" in caplog.text
    metrics.retracted()


def test_a_counter_of_the_hot_path_never_decreases_obs_03() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for tokens in (3, -2, 0, 4):
        metrics.sent(tokens)
    assert registry.get_sample_value("pdserve_tokens_total", {"kind": "output"}) == 7


def test_what_ended_how_is_counted_from_its_first_time_on() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    assert registry.get_sample_value("pdserve_requests_total", {"outcome": "OK"}) is None
    metrics.request_ended("OK")
    metrics.request_ended("OK")
    assert registry.get_sample_value("pdserve_requests_total", {"outcome": "OK"}) == 2
