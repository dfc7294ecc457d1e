"""Tracing that is on: OpenTelemetry's SDK with its exporter over gRPC. Imported only then."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.tracing import Attribute, Span
from common.version import VERSION

_PROPAGATOR = TraceContextTextMapPropagator()


class _Span:
    def __init__(self, span: trace.Span, *, at: Callable[[float], int]) -> None:
        self._span, self._at = span, at

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, *, error: str = "", **attributes: Attribute) -> None:
        # By the clock that it began by: the other one may have been set meanwhile.
        _end(self._span, self._at(time.monotonic()), error, attributes)


class OtlpTracing:
    """Its sampler, headers, certificates and limits are OpenTelemetry's variables' to say (OTEL_TRACES_SAMPLER, ...)."""

    is_on = True

    def __init__(self, endpoint: str, *, role: str, instance: str) -> None:
        names = {"service.name": f"pdserve-{role}", "service.version": VERSION}
        resource = Resource.create(names | ({"service.instance.id": instance} if instance else {}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve", VERSION)
        # Stages are timed by the monotonic clock, spans are by the other one.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, name: str, *, parent: str, began: float, is_server: bool = False, **attributes: Attribute) -> Span:
        return _Span(self._start(name, parent, began, is_server, attributes), at=self._at)

    def stage(self, name: str, *, parent: str, began: float, ended: float, error: str = "", **attributes: Attribute) -> None:
        span = self._start(name, parent, began, False, attributes)
        _end(span, self._at(ended), error, {})

    async def close(self, *, timeout_seconds: float) -> None:
        """In a thread that the process's end does not wait for: a collector that does not answer holds up nobody."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def send() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=send, name="last spans", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_seconds):
                await done.wait()
        except TimeoutError:
            pass

    def _start(self, name: str, parent: str, began: float, is_server: bool, attributes: dict[str, Attribute]) -> trace.Span:
        context = _PROPAGATOR.extract({"traceparent": parent} if parent else {})
        kind = trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL
        return self._tracer.start_span(
            name, context=context, kind=kind, start_time=self._at(began), attributes=_named(attributes)
        )

    def _at(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._epoch_ns


def _named(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    return {f"pdserve.{name}": value for name, value in attributes.items()}


def _end(span: trace.Span, at_ns: int, error: str, attributes: dict[str, Attribute]) -> None:
    if not span.is_recording():
        return
    if attributes:
        span.set_attributes(_named(attributes))
    if error:
        span.set_status(trace.StatusCode.ERROR, error)
    span.end(at_ns)
