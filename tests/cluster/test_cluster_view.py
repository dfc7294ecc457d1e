"""What GetCluster and `make top` say of a running cluster."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.version import VERSION
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import ROOT, free_port
from tests.helpers.prompts import prompt


async def view(client: Client) -> pb.GetClusterResponse:
    response: pb.GetClusterResponse = await client.stub.GetCluster(pb.GetClusterRequest(), timeout=5)
    return response


async def test_get_cluster_shows_the_router_and_its_workers_while_they_work(client: Client) -> None:
    before = await view(client)
    call = client.call(prompt(30), sampling={"max_tokens": 980, "ignore_eos": True})
    await first_event(call, "delta")

    async def decoding() -> bool:
        now = await view(client)
        workers = {worker.role: worker for worker in now.workers if worker.state != "lost"}
        return now.router.completions_in_decode == 1 and workers["decode"].running == workers["decode"].in_flight == 1

    await eventually(decoding, within=5)
    during = await view(client)
    router = during.router
    assert (router.version, router.is_ready, router.why_not_ready, router.is_stopping) == (VERSION, True, "", False)
    assert (router.in_flight, router.queued, router.in_line, router.tokens_in_line) == (1, 0, 0, 0)
    assert (router.max_queue, router.max_in_flight) == (1024, 4096)
    assert router.requests == before.router.requests + 1
    assert router.output_tokens > before.router.output_tokens
    assert router.uptime_ms > 0
    old = {worker.id: worker for worker in before.workers}
    for worker in during.workers:
        assert worker.has_session and worker.version == VERSION and worker.max_running == 32 and not worker.HasField("lost_ms")
        assert worker.last_report_ms < 5000 and worker.registered_ms > 0
        assert worker.attempts == old[worker.id].attempts + 1
        assert worker.attempts_failed == old[worker.id].attempts_failed
    call.cancel()
    await eventually(lambda: idle(client), within=3)


async def idle(client: Client) -> bool:
    now = await view(client)
    busy = (now.router.in_flight, now.router.completions_in_prefill, now.router.completions_in_decode)
    return busy == (0, 0, 0) and not any(worker.in_flight or worker.queued_tokens for worker in now.workers)


def top(address: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "deploy.top", "--once", "--router", address]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


async def test_top_prints_every_worker_once(cluster: Cluster, client: Client) -> None:
    shown = await asyncio.to_thread(top, cluster.address)
    assert shown.returncode == 0, shown.stderr
    assert f"router {cluster.address}  {VERSION}" in shown.stdout and "ready" in shown.stdout.splitlines()[0]
    for worker in (await view(client)).workers:
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith(worker.id)]
        assert line.split()[1:4] == [worker.role, "cpu", "ready"]


def test_top_without_a_terminal_prints_one_table_after_the_other(cluster: Cluster) -> None:
    line = [sys.executable, "-m", "deploy.top", "--interval", "0.1", "--router", cluster.address]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        try:
            heads = (text for text in shown.stdout if text.startswith("router "))
            assert all(cluster.address in next(heads) for _ in range(3))
            shown.send_signal(signal.SIGINT)
            assert shown.wait(20) == 0
        finally:
            shown.kill()


def test_top_says_in_one_line_that_no_router_answers() -> None:
    address = f"127.0.0.1:{free_port()}"
    shown = top(address)
    assert shown.returncode == 2 and shown.stdout == ""
    assert shown.stderr.startswith(f"error: no answer from a router on {address}: ") and shown.stderr.count("\n") == 1
