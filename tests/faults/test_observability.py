"""What the processes say about themselves stays true through cancels, retractions and broken metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.faults.test_cancellation import outcome
from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import ROOT, Process
from tests.helpers.prompts import prompt
from tests.helpers.scrape import Scrape, documented

pytestmark = pytest.mark.faults

ARGS = ("--page-size", "4", "--pool-pages", "120", "--max-context", "256", "--metrics-port", "0")
ROLES = ("router", "prefill", "decode")
BUSY = (
    *(
        "pdserve_requests_in_flight",
        "pdserve_requests_queued",
        "pdserve_requests_in_line",
        "pdserve_write_gap_seconds",
        "pdserve_tokens_in_line",
        "pdserve_outbox_messages",
    ),
    *("pdserve_running_requests", "pdserve_waiting_requests", "pdserve_queued_prefill_tokens", "pdserve_draining"),
)


def metrics_port(process: Process) -> int:
    return int(process.wait_for_line(r"metrics on 127\.0\.0\.1:(\d+)")[1])


async def scrape(cluster: Cluster) -> dict[str, Scrape]:
    """By role."""
    ports = [metrics_port(process) for process in (cluster.router, cluster.prefill[0], cluster.decode[0])]
    scrapes = await asyncio.gather(*(asyncio.to_thread(Scrape, port) for port in ports))
    return dict(zip(ROLES, scrapes, strict=True))


async def assert_idle_metrics(cluster: Cluster, *, within: float = 3.0) -> None:
    """From the metrics alone, without any request: nothing runs, waits or is held."""

    async def idle() -> bool:
        for role, now in (await scrape(cluster)).items():
            busy = {name: now.value(name) for name in BUSY if now.value(name)}
            states = {**now.by("pdserve_requests_by_state", "state"), **now.by("pdserve_completions", "stage")}
            assert not busy and not any(states.values()), f"{role}: {busy}, {states}"
            if role != "router":
                pages = now.by("pdserve_pages", "kind")
                assert pages["held"] == pages["quarantined"] == 0, f"{role}: {pages}"
                assert sum(pages.values()) == now.value("pdserve_pool_pages") == 120
        return True

    await eventually(idle, within=within)


@asynccontextmanager
async def rising_counters(cluster: Cluster) -> AsyncIterator[None]:
    """Scrapes all the while, every 200 ms: no counter ever decreases (OBS-03)."""

    async def watch() -> None:
        before = await scrape(cluster)
        while True:
            await asyncio.sleep(0.2)
            now = await scrape(cluster)
            for role in ROLES:
                for key, value in before[role].counters.items():
                    assert now[role].counters[key] >= value, f"{role}: {key} fell from {value} to {now[role].counters[key]}"
            before = now

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        assert watching.cancelled(), watching.exception()


@pytest.fixture(scope="module")
def metered(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A small cluster with metrics: its pages run out under a few long requests."""
    folder = tmp_path_factory.mktemp("metered")
    with Cluster(
        folder, tiny, worker_args=ARGS, router_args=["--metrics-port", "0"], prefill_args=["--chunk-tokens", "32"]
    ) as it:
        yield it


async def test_what_is_exported_is_what_is_documented(metered: Cluster) -> None:
    async with metered.client() as client:
        await client.generate(prompt(9), sampling={"max_tokens": 3})
    for role, now in (await scrape(metered)).items():
        expected = documented(role)
        assert {name: family.type for name, family in now.families.items()} == {name: e.type for name, e in expected.items()}
        for name, family in now.families.items():
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            # A labelled counter shows its labels with its first event.
            assert not family.samples or labels == expected[name].labels, name


async def test_obs_01_gauges_return_to_zero_after_everything_was_aborted(metered: Cluster) -> None:
    await assert_idle_metrics(metered)
    async with metered.client() as client:
        sampling = {"max_tokens": 200, "ignore_eos": True}
        calls = [client.call(prompt(40, seed=i), sampling=sampling) for i in range(100)]

        async def busy() -> bool:
            now = await scrape(metered)
            in_flight, held = now["router"].value("pdserve_requests_in_flight"), now["decode"].value("pdserve_pages", kind="held")
            return in_flight >= 80 and held > 0

        await eventually(busy, within=5)
        for call in calls:
            call.cancel()
    await assert_idle_metrics(metered)
    after = (await scrape(metered))["router"]
    assert after.value("pdserve_requests_total", outcome="CANCELLED") >= 80


async def odd_orders(client: Client) -> None:
    """Cancel before start, duplicate ids, retraction, outputs of one token and of none, refusals, deadlines that pass at once."""
    long = {"max_tokens": 150, "ignore_eos": True}
    for number in range(5):
        client.call(prompt(30, seed=number), sampling=long).cancel()
    twins = [client.call(prompt(20), request_id="twin", sampling={"max_tokens": 20, "ignore_eos": True}) for _ in range(3)]
    codes = [await outcome(twin) for twin in twins]
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.ALREADY_EXISTS}
    crowd = [client.call(prompt(60, seed=number), sampling=long) for number in range(6)]  # 6 x 210 tokens in 480 tokens' pages.
    assert {await outcome(call) for call in crowd} == {grpc.StatusCode.OK}
    for number in range(10):
        await client.generate(prompt(10, seed=number), sampling={"max_tokens": 1})
        aborted = client.call(prompt(200, seed=number), request_id=f"abort-{number}", sampling=long)
        await client.stub.Abort(pb.AbortRequest(request_id=f"abort-{number}"), timeout=5)
        await client.stub.Abort(pb.AbortRequest(request_id=f"abort-{number}"), timeout=5)
        aborted.cancel()
        await client.refusal(prompt(300), sampling={"max_tokens": 1})
        await outcome(client.call(prompt(10), timeout=0.002, sampling=long))


async def test_obs_03_counters_only_rise_whatever_the_order(metered: Cluster) -> None:
    async with metered.client() as client, rising_counters(metered):
        before = await scrape(metered)
        await odd_orders(client)
    await assert_idle_metrics(metered)
    after = await scrape(metered)
    router, prefill, decode = (after[role] for role in ROLES)
    retracted = router.value("pdserve_retractions_total")
    assert retracted > before["router"].value("pdserve_retractions_total"), "the pages were to run out"
    # One that met a cancel on its way is the worker's alone.
    assert retracted <= decode.value("pdserve_decode_retractions_total", cause="pages")
    # One that is cancelled while it waits to begin anew never does.
    assert 0 < router.value("pdserve_attempts_total", cause="retraction") <= retracted
    assert router.value("pdserve_refusals_total", reason="already_exists") >= 1
    assert router.value("pdserve_refusals_total", reason="out_of_range") == 10
    handoffs = prefill.by("pdserve_handoffs_total", "transport")
    assert 6 < sum(handoffs.values()) <= decode.value("pdserve_commits_total", code="OK")
    assert prefill.value("pdserve_transfer_bytes_total", transport="shm") > 0
    assert prefill.value("pdserve_transfer_seconds_count", transport="shm") == handoffs["shm"]
    for process in metered.processes:
        for trouble in ("Traceback", "could not be updated", "could not be read"):
            assert trouble not in process.output, process.output[-2000:]


BROKEN = """
import prometheus_client

from router.hot_metrics import HotCounter, HotHistogram


def fail(*_, **__):
    raise RuntimeError("this metric is broken")


prometheus_client.Counter.inc = fail
prometheus_client.Histogram.observe = fail
HotCounter.add = HotHistogram.observe = fail
"""


async def test_obs_03_metrics_that_fail_do_not_stop_generation(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")
    args = ["--page-size", "4", "--pool-pages", "120", "--max-context", "256"]
    with Cluster(tmp_path, tiny, worker_args=args) as cluster:
        async with cluster.client() as client:
            for seed in range(3):
                ids = prompt(11, seed=seed)
                answer = await client.generate(ids, sampling={"max_tokens": 20, "ignore_eos": True})
                assert answer.ids == reference.greedy(tiny, ids, 20)
            await client.refusal(prompt(300), sampling={"max_tokens": 1})
            for process in cluster.processes:
                assert 1 <= process.output.count("a metric could not be updated") <= 10, process.output[-2000:]
                assert "RuntimeError: this metric is broken" in process.output

            async def idle() -> bool:
                return all((w.running, w.waiting, w.held_pages) == (0, 0, 0) for w in (await client.workers()).values())

            await eventually(idle, within=3)
