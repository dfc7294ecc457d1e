"""A small OTLP collector: keeps the spans it is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.helpers.eventually import eventually


@dataclass(frozen=True)
class SpanSeen:
    """service: without "pdserve-". parent: a span id, "" for none. ids are hex."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    begin_ns: int
    end_ns: int
    error: str
    attributes: dict[str, Any] = field(compare=False)

    def __getitem__(self, name: str) -> Any:
        """An attribute, named without pdserve."""
        return self.attributes[f"pdserve.{name}"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """with Collector() as collector: ... collector.endpoint. In threads of its own, so that tests of many loops may share it."""

    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        for of_resource in request.resource_spans:
            service = next(a.value.string_value for a in of_resource.resource.attributes if a.key == "service.name")
            for of_scope in of_resource.scope_spans:
                self.spans += [_seen(service.removeprefix("pdserve-"), span) for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def trace(self, trace_id: str, *, spans: int, within: float = 10.0) -> list[SpanSeen]:
        """Waits until so many spans of a trace are there, in order of their begin."""

        def found() -> bool:
            names = [f"{span.service}.{span.name}" for span in self.of(trace_id)]
            assert len(names) >= spans, f"{len(names)} of {spans} spans: {names}"
            return True

        await eventually(found, within=within)
        return self.of(trace_id)

    def of(self, trace_id: str) -> list[SpanSeen]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.begin_ns)


def _seen(service: str, span: Any) -> SpanSeen:
    def plain(value: Any) -> Any:
        return getattr(value, value.WhichOneof("value"))

    return SpanSeen(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=span.status.message if span.status.code == 2 else "",
        attributes={attribute.key: plain(attribute.value) for attribute in span.attributes},
    )
