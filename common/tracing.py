"""Traces: one span per stage of a request, over the three processes, sent by OTLP. Off unless an endpoint is given.

    client's traceparent --> request (router) --> queue, attempt (router)
                                                  attempt --> queue, reserve, compute, handoff (prefill worker)
                                                          '-> receive, decode (decode worker)

A parent travels as a W3C traceparent (https://www.w3.org/TR/trace-context/): in the client's metadata, and in Req.traceparent to
the workers. Spans are handed to a thread that sends them, and dropped if it cannot keep up: the event loop never waits for it.
"""

from __future__ import annotations

import os
from typing import Protocol
from urllib.parse import urlsplit

from common.errors import StartError

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own, for who gives no --otlp-endpoint."""

LAST_SPANS_SECONDS = 2.0
"""How long a process that ends waits for its last spans to be sent."""

Attribute = str | int | float | bool


class Span(Protocol):
    """One under way. traceparent: for those that have it as their parent; empty if there are none to tell."""

    @property
    def traceparent(self) -> str: ...

    def end(self, *, error: str = "", **attributes: Attribute) -> None:
        """Only the first call counts. error: why it did not end well."""


class Tracing(Protocol):
    """Event loop only. Times are time.monotonic() seconds. Attributes are named pdserve.<name>."""

    @property
    def is_on(self) -> bool: ...

    def begin(self, name: str, *, parent: str, began: float, is_server: bool = False, **attributes: Attribute) -> Span:
        """parent: a traceparent; one that is none begins a new trace."""

    def stage(self, name: str, *, parent: str, began: float, ended: float, error: str = "", **attributes: Attribute) -> None:
        """A span that is over."""

    async def close(self, *, timeout_seconds: float) -> None:
        """Sends what is left, for so long."""


class _NoSpan:
    traceparent = ""

    def end(self, *, error: str = "", **attributes: Attribute) -> None:
        pass


NO_SPAN: Span = _NoSpan()


class NoTracing:
    """Tracing that is off."""

    is_on = False

    def begin(self, name: str, *, parent: str, began: float, is_server: bool = False, **attributes: Attribute) -> Span:
        return NO_SPAN

    def stage(self, name: str, *, parent: str, began: float, ended: float, error: str = "", **attributes: Attribute) -> None:
        pass

    async def close(self, *, timeout_seconds: float) -> None:
        pass


NO_TRACING: Tracing = NoTracing()


def check_endpoint(endpoint: str | None, *, name: str = "--otlp-endpoint") -> None:
    """Raises ValueError unless it is None or a URL that an OTLP exporter over gRPC takes. name: of what says it."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError(f"{name} must be http://HOST:PORT or https://HOST:PORT (OTLP over gRPC), got {endpoint!r}")


def start_tracing(endpoint: str | None, *, role: str, instance: str = "") -> Tracing:
    """instance: this process among those of its role. Raises StartError if the packages are missing, or on a variable that
    names no endpoint: an exporter would try to reach it for ever and say so in passing only."""
    endpoint = endpoint or _endpoint_of_environment()
    if endpoint is None:
        return NO_TRACING
    try:
        from common.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        raise StartError(f"traces to {endpoint} need the extra 'otlp' (pip install 'pdserve[otlp]'): {error}") from error
    try:
        return OtlpTracing(endpoint, role=role, instance=instance)
    except (ValueError, OSError, RuntimeError) as error:  # What OpenTelemetry makes of its variables.
        raise StartError(f"traces to {endpoint} cannot be set up as the OTEL_ variables say: {error}") from error


def _endpoint_of_environment() -> str | None:
    for name in ENDPOINT_VARIABLES:
        if endpoint := os.environ.get(name):
            try:
                check_endpoint(endpoint, name=name)
            except ValueError as error:
                raise StartError(str(error)) from None
            return endpoint
    return None
