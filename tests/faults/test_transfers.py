"""KV on its way to a decode worker that stops arriving: one stream of many, or all that there is between two workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.faults.conftest import COUNTING
from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.grpc_proxy import GrpcProxy
from tests.helpers.load import Stream
from tests.helpers.process import free_port
from tests.helpers.prompts import prompt
from tests.helpers.relay import connections_of
from tests.helpers.relayed import RelayedWorker
from tests.helpers.scrape import Scrape

pytestmark = pytest.mark.faults

ARGS = ("--page-size", "4", "--pool-pages", "600", "--max-context", "2048")
PUSH = "/pdserve.v1.HandoffService/Push"


class EveryFifthPush:
    """Lets the first frame of every fifth transfer pass, and nothing after it, until it is over."""

    def __init__(self) -> None:
        self.pushes = self.stuck = 0
        self.is_over = False

    async def __call__(self, method: str, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        is_stuck = False
        if method == PUSH:
            self.pushes += 1
            is_stuck = self.pushes % 5 == 0 and not self.is_over
            self.stuck += is_stuck
        number = 0
        async for request in requests:
            number += 1
            if not is_stuck or number == 1:
                yield request
        if is_stuck:  # Nor does the end of the stream pass.
            await asyncio.Event().wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.long)])
async def test_hnd_07_a_transfer_that_begins_and_never_ends_is_given_up(tiny: Path, tmp_path: Path, seconds: int) -> None:
    meddle = EveryFifthPush()
    prefill = ["--transport", "grpc", "--transfer-timeout", f"{seconds}s"]
    with Cluster(tmp_path, tiny, decode=0, worker_args=ARGS, prefill_args=prefill, is_awaited=False) as cluster:
        listen = f"127.0.0.1:{free_port()}"
        async with GrpcProxy(listen, meddle) as proxy, cluster.client() as client:
            cluster.start_worker("decode", listen=listen, extra=["--advertise", proxy.address])
            await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")
            gate, began, ends = asyncio.Semaphore(8), time.monotonic(), list[float]()

            async def one(i: int) -> None:
                ids = prompt(100, seed=i)
                async with gate:
                    try:
                        answer = await client.generate(ids, sampling={"max_tokens": 4, "ignore_eos": True}, timeout=15)
                        assert answer.ids == reference.greedy(tiny, ids, 4)
                    except grpc.aio.AioRpcError as error:
                        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                    ends.append(time.monotonic() - began)

            await asyncio.gather(*(one(i) for i in range(100)))
            assert meddle.stuck >= 20
            assert ends[-1] - ends[49] < 2 * ends[49] + 2 * min(seconds, 15), "it gets slower and slower"
            meddle.is_over = True
            await cluster.capacity_probe(client, within=30)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "cut_seconds", "timeout_seconds"),
    [
        ("grpc", 1, 4),
        ("grpc", 4, 1),
        ("shm", 4, 1),
        pytest.param("grpc", 30, 20, marks=pytest.mark.long),
        pytest.param("shm", 30, 20, marks=pytest.mark.long),
    ],
)
async def test_hnd_09_transfers_cut_off_between_the_workers_end_and_their_pages_come_back(
    tiny: Path, tmp_path: Path, transport: str, cut_seconds: int, timeout_seconds: int
) -> None:
    """Packets between the two workers are dropped, nobody is told; the router still hears both."""
    prefill = ["--transport", transport, "--chunk-tokens", "16", "--transfer-timeout", f"{timeout_seconds}s"]
    decode = ["--lease", f"{timeout_seconds}s"]
    with Cluster(
        tmp_path, tiny, decode=0, worker_args=ARGS, prefill_args=prefill, decode_args=decode, is_awaited=False, patience=""
    ) as cluster:
        pair = RelayedWorker(cluster, "decode", concerns=connections_of(cluster.prefill[0].pid))
        async with pair as far, cluster.client() as client:
            await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")
            assert await is_right(client, tiny, 0, timeout=10)
            assert 0 < far.relay.concerned < far.relay.connections, "the prefill worker's alone"
            before = far.relay.passed_up
            calls = [asyncio.create_task(is_right(client, tiny, i, timeout=60)) for i in range(20)]
            await eventually(lambda: far.relay.passed_up > before + 5_000, within=10, every=0.002)
            far.relay.is_whole.clear()
            await asyncio.sleep(cut_seconds)
            far.relay.is_whole.set()
            mended = time.monotonic()
            succeeded = sum(await asyncio.gather(*calls))
            assert succeeded == 20 or cut_seconds > timeout_seconds
            assert time.monotonic() - mended < 15, "what was cut off ends soon after"
            await eventually(lambda: is_right(client, tiny, 21, timeout=5), within=10)
            await cluster.capacity_probe(client)


async def is_right(client: Client, model: Path, seed: int, *, timeout: float) -> bool:
    """The right answer; False: it ended UNAVAILABLE instead."""
    ids = prompt(300 + seed, seed=seed)
    try:
        answer = await client.generate(ids, sampling={"max_tokens": 4, "ignore_eos": True}, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error.details()
        return False
    assert answer.ids == reference.greedy(model, ids, 4)
    return True


async def test_what_a_prefill_worker_committed_before_it_was_killed_goes_on_without_it(
    counting_model: Path, tmp_path: Path
) -> None:
    """The only one, so that nobody could begin the request anew. Its word of the hand-off has not reached the router, and the
    decode worker has no place in its batch yet, so that no token says it either."""
    metrics = free_port()
    decode = ["--max-running", "1", "--metrics-port", str(metrics)]
    with Cluster(tmp_path, counting_model, prefill=0, worker_args=COUNTING, decode_args=decode, is_awaited=False) as cluster:
        async with RelayedWorker(cluster, "prefill") as near, cluster.client() as client:
            await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")
            first = Stream(client, 1, tokens=900)
            await first.reaches(3)
            near.relay.is_answering.clear()
            second = Stream(client, 40, tokens=20, context=30)
            await eventually(lambda: Scrape(metrics).value("pdserve_requests_by_state", state="committed") == 1, within=20)
            assert second.ids == [], "the router has not heard of it"
            cluster.prefill.pop().kill()
            near.relay.cut()
            for stream in (first, second):
                await stream.end()
                assert stream.attempts == 1
            await cluster.assert_idle(client)
