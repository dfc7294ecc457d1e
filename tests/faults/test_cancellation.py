"""A client that leaves: in every state everything it used comes back, at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.helpers import reference
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt
from tests.helpers.relayed import RelayedWorker

pytestmark = pytest.mark.faults


async def outcome(call: Any) -> grpc.StatusCode:
    """Reads a call to its end; its status."""
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def is_busy(client: Client, role: str, at_least: int = 1) -> bool:
    return any(w.role == role and w.running + w.waiting >= at_least for w in (await client.workers()).values())


PATIENT = ("--page-size", "16", "--pool-pages", "160", "--max-context", "2048")


@pytest.fixture(scope="module")
def patient(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prompts of seconds, and one request at a time in the decode worker's batch."""
    with Cluster(
        tmp_path_factory.mktemp("patient"),
        tiny,
        worker_args=PATIENT,
        prefill_args=["--chunk-tokens", "1"],  # What lasts for less than a report's interval is never seen in one.
        decode_args=["--max-running", "1"],
    ) as running:
        yield running


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_can_01_a_cancelled_prefill_does_not_hold_up_the_next(patient: Cluster, max_tokens: int) -> None:
    async with patient.client() as client:

        async def seconds_to_first_token(seed: int) -> float:
            began = time.monotonic()
            await client.generate(prompt(9, seed=seed), sampling={"max_tokens": 1})
            return time.monotonic() - began

        unloaded = max([await seconds_to_first_token(seed) for seed in range(5)])
        long = client.call(prompt(2046, seed=max_tokens), sampling={"max_tokens": max_tokens})
        await eventually(lambda: is_busy(client, "prefill"), within=5)
        long.cancel()
        assert await seconds_to_first_token(6) < unloaded + 0.3
        assert await outcome(long) is grpc.StatusCode.CANCELLED
        await (patient.capacity_probe(client, within=30) if max_tokens == 2 else patient.assert_idle(client))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_can_02_cancel_between_prefill_and_decode(tiny: Path, tmp_path: Path, transport: str) -> None:
    args = ["--page-size", "4", "--pool-pages", "256", "--max-context", "1024"]
    with Cluster(tmp_path, tiny, worker_args=args, prefill_args=["--chunk-tokens", "8", "--transport", transport]) as cluster:
        async with cluster.client() as client:
            decode = cluster.decode[0]

            async def all_at(length: int, *, is_paused: bool) -> None:
                """Five, cancelled while the decode worker stands still: before it is asked for pages, or as prefill ends."""
                if is_paused:
                    decode.pause()
                sampling = {"max_tokens": 20, "ignore_eos": True}
                calls = [client.call(prompt(length, seed=i), sampling=sampling) for i in range(5)]
                if is_paused:
                    await asyncio.sleep(0.05)
                else:
                    await first_event(calls[0], "delta")  # Its pages are there, the others' on their way.
                    decode.pause()
                    await asyncio.sleep(0.15)  # What had its pages has been computed.
                began = time.monotonic()
                for call in calls:
                    call.cancel()
                assert {await outcome(call) for call in calls} == {grpc.StatusCode.CANCELLED}
                assert time.monotonic() - began < 3
                decode.resume()

            for i in range(10):
                await all_at(100 + i, is_paused=i % 2 == 0)
            await cluster.capacity_probe(client)


async def test_can_04_cancel_after_the_transfer_and_before_a_place_in_the_batch(patient: Cluster, tiny: Path) -> None:
    async with patient.client() as client:
        ids = prompt(10)
        long = client.call(ids, sampling={"max_tokens": 600, "ignore_eos": True})
        first = await first_event(long, "delta")
        waiting = [client.call(prompt(12, seed=i), sampling={"max_tokens": 8, "ignore_eos": True}) for i in range(10)]
        await asyncio.gather(*(first_event(call, "delta") for call in waiting))  # Token 0 is prefill's.
        for call in waiting:
            call.cancel()
        assert {await outcome(call) for call in waiting} == {grpc.StatusCode.CANCELLED}
        rest = [token async for event in long for token in event.delta.token_ids]
        assert len(rest) + len(first.delta.token_ids) == 600
        assert [*first.delta.token_ids, *rest][:200] == reference.greedy(tiny, ids, 200)
        await patient.capacity_probe(client, within=30)


async def test_can_07_a_request_id_is_free_again_once_its_call_was_cancelled(client: Client) -> None:
    for _ in range(200):
        call = client.call(prompt(5), request_id="X", sampling={"max_tokens": 200, "ignore_eos": True})
        await first_event(call, "delta")
        call.cancel()
        try:
            answer = await client.generate(prompt(6), request_id="X", sampling={"max_tokens": 8, "ignore_eos": True}, timeout=10)
            assert len(answer.ids) == 8
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_can_08_a_deadline_that_passes_in_the_queue_computes_nothing(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "16", "--pool-pages", "600", "--max-context", "1600"]
    with Cluster(tmp_path, tiny, worker_args=args, prefill_args=["--chunk-tokens", "1", "--max-running", "2"]) as cluster:
        async with cluster.client() as client:
            long = [asyncio.ensure_future(client.generate(prompt(1500, seed=i), sampling={"max_tokens": 1})) for i in range(2)]
            await eventually(lambda: is_busy(client, "prefill", 2), within=5)
            began = time.monotonic()
            late = [client.call(prompt(600, seed=10 + i), timeout=0.5, sampling={"max_tokens": 1}) for i in range(50)]
            assert {await outcome(call) for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert time.monotonic() - began < 5
            await asyncio.gather(*long)
            began = time.monotonic()
            await client.generate(prompt(10), sampling={"max_tokens": 1})
            assert time.monotonic() - began < 6, "the expired ones, thousands of chunks, were prefilled first"
            await cluster.capacity_probe(client)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("calls", [2000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_can_10_deadlines_of_a_few_milliseconds(cluster: Cluster, client: Client, calls: int) -> None:
    rng = random.Random(10)
    gate = asyncio.Semaphore(50)
    pids = [process.pid for process in cluster.processes]

    async def one(i: int) -> None:
        async with gate:
            code = await outcome(client.call(prompt(6, seed=i), timeout=rng.uniform(0.0005, 0.005), sampling={"max_tokens": 4}))
            assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK)

    await asyncio.gather(*(one(i) for i in range(calls)))
    await asyncio.gather(*(client.generate(prompt(6, seed=i), sampling={"max_tokens": 4}) for i in range(20)))
    await cluster.capacity_probe(client)
    assert pids == [process.pid for process in cluster.processes] and all(process.is_alive for process in cluster.processes)


@pytest.mark.timeout(120)
async def test_can_11_every_release_arrives_after_cancels_at_random_tokens(tiny: Path, tmp_path: Path) -> None:
    """What goes to the decode worker takes 0.1 s each way, so a call to it 0.2 s."""
    rng = random.Random(11)
    gate = asyncio.Semaphore(100)
    args = ["--page-size", "4", "--pool-pages", "1500", "--max-context", "256"]
    prefill = ["--transport", "grpc", "--max-running", "64"]
    with Cluster(tmp_path, tiny, decode=0, worker_args=args, prefill_args=prefill, is_awaited=False) as cluster:
        async with RelayedWorker(cluster, "decode") as slow, cluster.client() as client:
            slow.relay.delay = 0.1
            await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")

            async def one(i: int) -> None:
                async with gate:
                    call = client.call(prompt(rng.randint(1, 90), seed=i), sampling={"max_tokens": 60, "ignore_eos": True})
                    try:
                        for _ in range(rng.randint(0, 20)):
                            await call.read()
                    finally:
                        call.cancel()

            await asyncio.gather(*(one(i) for i in range(500)))
            await cluster.assert_idle(client, within=2)


async def test_obs_01_gauges_return_to_zero_after_everything_was_cancelled(cluster: Cluster, client: Client) -> None:
    calls = [client.call(prompt(50, seed=i), sampling={"max_tokens": 500, "ignore_eos": True}) for i in range(60)]
    await first_event(calls[0], "delta")
    for call in calls:
        call.cancel()
    await cluster.assert_idle(client, within=3)


@pytest.mark.parametrize("n", [2, 4])
async def test_cancelling_n_completions_gives_back_their_shared_pages(cluster: Cluster, client: Client, n: int) -> None:
    for length in (7, 8, 65):
        call = client.call(prompt(length, seed=n), n=n, sampling={"max_tokens": 400, "ignore_eos": True, "temperature": 1.0})
        await first_event(call, "delta")
        call.cancel()
        await cluster.assert_idle(client, within=2)
