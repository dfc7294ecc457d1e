"""Where traces go, and that they go nowhere unless asked to."""

from __future__ import annotations

import sys
import time

import pytest

from common.errors import StartError
from common.tracing import ENDPOINT_VARIABLES, NO_TRACING, check_endpoint, start_tracing
from tests.helpers.collector import Collector


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENDPOINT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:4317", "https://collector.example:4317", "http://[::1]:4317"])
def test_urls_of_a_collector_are_taken(endpoint: str | None) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4317", "http://127.0.0.1", "grpc://a:1", "http://:4317", "http://a:x"])
def test_anything_else_is_refused_with_its_rule(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT .*, got "):
        check_endpoint(endpoint)


async def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing = start_tracing(None, role="router")
    assert tracing is NO_TRACING and not tracing.is_on
    span = tracing.begin("request", parent="", began=0.0)
    span.end(error="x")
    assert span.traceparent == ""
    await tracing.close(timeout_seconds=0.0)


async def test_opentelemetry_s_own_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracing = start_tracing(None, role="router")
    assert tracing.is_on
    span = tracing.begin("request", parent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", began=0.0)
    assert span.traceparent.startswith("00-" + "a" * 32 + "-") and span.traceparent.endswith("-01")
    await tracing.close(timeout_seconds=0.1)


async def test_a_clock_that_is_set_back_ends_no_span_before_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        tracing = start_tracing(collector.endpoint, role="router")
        began = time.monotonic()
        span = tracing.begin("request", parent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", began=began)
        an_hour_ago = time.time_ns() - 3600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: an_hour_ago)
        span.end()
        await tracing.close(timeout_seconds=10.0)
        (seen,) = await collector.trace("a" * 32, spans=1)
        assert 0 <= seen.end_ns - seen.begin_ns < 60 * 10**9


@pytest.mark.parametrize("variable", ENDPOINT_VARIABLES)
def test_a_variable_that_names_no_endpoint_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "collector:4317")
    with pytest.raises(StartError, match=f"^{variable} must be http://HOST:PORT or .*, got 'collector:4317'"):
        start_tracing(None, role="router")


def test_another_variable_that_opentelemetry_cannot_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(StartError, match="traces to http://127.0.0.1:1 cannot be set up as the OTEL_ variables say: .*'soon'"):
        start_tracing("http://127.0.0.1:1", role="router")


def test_missing_packages_are_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "common.otlp", raising=False)
    with pytest.raises(StartError, match=r"traces to http://127.0.0.1:1 need the extra 'otlp' \(pip install 'pdserve\[otlp\]'\)"):
        start_tracing("http://127.0.0.1:1", role="router")
