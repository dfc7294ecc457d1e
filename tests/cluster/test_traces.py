"""Traces over the three processes, as a collector gets them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.helpers.client import Answer, Client, first_event, request
from tests.helpers.cluster import Cluster
from tests.helpers.collector import Collector, SpanSeen
from tests.helpers.eventually import eventually
from tests.helpers.process import free_port
from tests.helpers.prompts import prompt

ARGS = ("--page-size", "4", "--pool-pages", "300", "--max-context", "1024")
ATTEMPT = [
    *("router.queue", "router.attempt"),
    *("prefill.queue", "prefill.reserve", "prefill.compute", "prefill.handoff"),
    *("decode.receive", "decode.decode"),
]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def traced(tiny: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    """A cluster with two decode workers that tells the collector at once."""
    flag = ["--otlp-endpoint", collector.endpoint]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        folder = tmp_path_factory.mktemp("traced")
        with Cluster(folder, tiny, decode=2, worker_args=[*ARGS, *flag], router_args=flag) as running:
            yield running


def traceparent(trace_id: str, span_id: str, *, sampled: bool = True) -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{trace_id}-{span_id}-0{int(sampled)}"),)


async def ask(client: Client, metadata: Sequence[tuple[str, str]], **fields: Any) -> Answer:
    answer = Answer()
    sampling = {"max_tokens": fields.pop("max_tokens", 8), "ignore_eos": True}
    async for event in client.stub.Generate(request(prompt(20), sampling=sampling, **fields), timeout=20, metadata=metadata):
        answer.add(event)
    return answer


def names(spans: Sequence[SpanSeen]) -> list[str]:
    return sorted(f"{span.service}.{span.name}" for span in spans)


def by_name(spans: Sequence[SpanSeen], service: str, name: str) -> SpanSeen:
    (span,) = [span for span in spans if (span.service, span.name) == (service, name)]
    return span


async def test_one_trace_spans_the_three_processes_under_the_caller_s_span(traced: Cluster, collector: Collector) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    async with traced.client() as client:
        answer = await ask(client, traceparent(trace_id, caller), request_id="traced-1")
        spans = await collector.trace(trace_id, spans=9)
    assert names(spans) == sorted(["router.request", *ATTEMPT])
    root, attempt = by_name(spans, "router", "request"), by_name(spans, "router", "attempt")
    assert root.parent == caller and root["request_id"] == "traced-1" and root["output_tokens"] == 8
    assert root["outcome"] == "OK" and not any(span.error for span in spans)
    for span in spans:
        if span is not root:
            above = root if span.service == "router" else attempt
            assert span.parent == above.span_id, f"{span.service}.{span.name}"
            assert span.begin_ns >= above.begin_ns - 5_000_000
        assert span.end_ns >= span.begin_ns
    uids = {span["uid"] for span in spans if span is not root}
    assert len(uids) == 1, "all are about the same completion"
    assert answer.started is not None
    assert (attempt["prefill_worker"], attempt["decode_worker"]) == (answer.started.prefill_worker, answer.started.decode_worker)
    assert by_name(spans, "decode", "decode")["output_tokens"] == 8
    compute, handoff = by_name(spans, "prefill", "compute"), by_name(spans, "prefill", "handoff")
    assert handoff.begin_ns >= compute.end_ns and handoff["transport"] == "shm"


async def test_a_retry_is_a_second_attempt_of_the_same_trace(traced: Cluster, collector: Collector) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    async with traced.client() as client:
        process_of = await traced.workers_by_id(client)
        sampling = {"max_tokens": 900, "ignore_eos": True}
        call = client.stub.Generate(request(prompt(20), sampling=sampling), timeout=20, metadata=traceparent(trace_id, caller))
        started = (await first_event(call, "started")).started
        process_of[started.decode_worker].kill()
        assert len([token async for event in call for token in event.delta.token_ids]) == 900
        # The killed process took its own spans along, unless the first was sent already.
        of_first = {"decode.receive", "decode.decode"}
        expected = ["router.request", *ATTEMPT, *(name for name in ATTEMPT if name not in of_first)]

        def all_there() -> bool:
            missing = Counter(expected) - Counter(names(collector.of(trace_id)))
            assert not missing, missing
            return True

        await eventually(all_there, within=10)
        spans = collector.of(trace_id)
        await client_sees_one_decode_worker_again(traced, client)
    root = by_name(spans, "router", "request")
    first, second = [span for span in spans if (span.service, span.name) == ("router", "attempt")]
    assert (first["attempt"], second["attempt"]) == (1, 2) and first["uid"] == second["uid"]
    assert first.parent == second.parent == root.span_id
    assert first.error and not second.error and not root.error
    assert first["decode_worker"] != second["decode_worker"]
    assert by_name(spans, "decode", "decode").parent == second.span_id
    assert second.span_id in {span.parent for span in spans if span.name == "receive"}
    assert {span.parent for span in spans if span.service == "prefill"} == {first.span_id, second.span_id}


async def client_sees_one_decode_worker_again(cluster: Cluster, client: Client) -> None:
    """Puts back what the test killed, for the others."""
    cluster.decode = [process for process in cluster.decode if process.is_alive]
    process = cluster.start_worker("decode")
    await asyncio.to_thread(cluster.wait_until_joined, process)


async def test_completions_that_end_early_end_their_spans_and_refusals_have_one(traced: Cluster, collector: Collector) -> None:
    one, many, refused = (secrets.token_hex(16) for _ in range(3))
    async with traced.client() as client:
        await ask(client, traceparent(one, "1" * 16), max_tokens=1)
        call = client.stub.Generate(
            request(prompt(20), n=2, sampling={"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}),
            timeout=20,
            metadata=traceparent(many, "1" * 16),
        )
        counts = {0: 0, 1: 0}
        while min(counts.values()) < 2:  # A second token is the decode worker's.
            event = await call.read()
            counts[event.index] += len(event.delta.token_ids)
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(client, traceparent(refused, "1" * 16), max_tokens=0)
        single = await collector.trace(one, spans=5)
        cancelled = await collector.trace(many, spans=10)
        (request_span,) = await collector.trace(refused, spans=1)
    assert names(single) == ["prefill.compute", "prefill.queue", "router.attempt", "router.queue", "router.request"]
    assert not any(span.error for span in single)
    assert names(cancelled) == sorted(["router.request", *ATTEMPT, "decode.decode"])
    assert {span.error for span in cancelled if span.name == "decode"} == {"cancelled"}
    assert by_name(cancelled, "router", "request").error == "CANCELLED"
    assert request_span.error == "INVALID_ARGUMENT" and request_span.name == "request"


async def test_what_the_caller_does_not_sample_is_not_sent_and_no_parent_begins_a_trace(
    traced: Cluster, collector: Collector
) -> None:
    unsampled = secrets.token_hex(16)
    async with traced.client() as client:
        await ask(client, traceparent(unsampled, "1" * 16, sampled=False))
        await ask(client, (("traceparent", "not-a-traceparent"),), request_id="of-its-own")

        def own() -> list[SpanSeen]:
            return [s for s in collector.spans if s.name == "request" and s["request_id"] == "of-its-own"]

        trace_id = ""
        for _ in range(100):
            if found := own():
                trace_id = found[0].trace_id
                break
            await asyncio.sleep(0.1)
        spans = await collector.trace(trace_id, spans=9)
        assert by_name(spans, "router", "request").parent == ""
        assert collector.of(unsampled) == []


async def test_a_collector_that_is_not_there_holds_up_nobody(tiny: Path, tmp_path: Path) -> None:
    flag = ["--otlp-endpoint", f"http://127.0.0.1:{free_port()}"]
    with Cluster(tmp_path, tiny, worker_args=[*ARGS, *flag], router_args=flag) as cluster:
        async with cluster.client() as client:
            for _ in range(5):
                assert len((await ask(client, ())).ids) == 8
        began = time.monotonic()
        codes = [await asyncio.to_thread(process.stop) for process in cluster.processes]
        assert codes == [0, 0, 0] and time.monotonic() - began < 20
        assert not any("Traceback" in process.output for process in cluster.processes)
