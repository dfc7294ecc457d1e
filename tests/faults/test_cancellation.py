"""A client that leaves: in every state everything it used comes back, at once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.helpers import reference
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt

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


async def test_can_01_a_cancelled_prefill_does_not_hold_up_the_next(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "16", "--pool-pages", "256", "--max-context", "2048"]
    with Cluster(tmp_path, tiny, worker_args=args, prefill_args=["--chunk-tokens", "1"]) as cluster:
        async with cluster.client() as client:
            short = prompt(8)
            began = time.monotonic()
            await client.generate(short, sampling={"max_tokens": 1})
            unloaded = time.monotonic() - began
            long = client.call(prompt(2047), sampling={"max_tokens": 1})
            await eventually(lambda: is_busy(client, "prefill"), within=5)
            long.cancel()
            began = time.monotonic()
            await client.generate(prompt(9), sampling={"max_tokens": 1})
            assert time.monotonic() - began < unloaded + 0.5
            assert await outcome(long) is grpc.StatusCode.CANCELLED
            await cluster.capacity_probe(client, within=30)  # 2,000 steps of one token, twice


@pytest.mark.timeout(120)
async def test_can_02_cancel_between_prefill_and_decode(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "128", "--max-context", "256"]
    with Cluster(tmp_path, tiny, worker_args=args) as cluster:
        async with cluster.client() as client:
            for i in range(12):
                cluster.decode[0].pause()
                calls = [client.call(prompt(20 + i, seed=j), sampling={"max_tokens": 20}) for j in range(4)]
                await asyncio.sleep(0.1)
                for call in calls:
                    call.cancel()
                began = time.monotonic()
                assert {await outcome(call) for call in calls} == {grpc.StatusCode.CANCELLED}
                assert time.monotonic() - began < 1
                cluster.decode[0].resume()
            await cluster.capacity_probe(client)


async def test_can_04_cancel_after_transfer_before_a_batch_slot(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "600", "--max-context", "2048"]
    with Cluster(
        tmp_path, tiny, worker_args=args, decode_args=["--max-running", "1"], prefill_args=["--max-running", "16"]
    ) as cluster:
        async with cluster.client() as client:
            ids = prompt(10)
            long = client.call(ids, sampling={"max_tokens": 2000, "ignore_eos": True})
            first = await first_event(long, "delta")
            waiting = [client.call(prompt(12, seed=i), sampling={"max_tokens": 8}) for i in range(10)]
            await asyncio.gather(*(first_event(call, "started") for call in waiting))
            for call in waiting:
                call.cancel()
            assert {await outcome(call) for call in waiting} == {grpc.StatusCode.CANCELLED}
            rest = [token async for event in long for token in event.delta.token_ids]
            assert len(rest) + len(first.delta.token_ids) == 2000
            assert [*first.delta.token_ids, *rest][:200] == reference.greedy(tiny, ids, 200)
            await cluster.capacity_probe(client)


async def test_can_07_a_request_id_is_free_again_once_its_call_was_cancelled(client: Client) -> None:
    for _ in range(100):
        call = client.call(prompt(5), request_id="X", sampling={"max_tokens": 200, "ignore_eos": True})
        await first_event(call, "started")
        call.cancel()
        try:
            answer = await client.generate(prompt(6), request_id="X", sampling={"max_tokens": 8, "ignore_eos": True}, timeout=10)
            assert len(answer.ids) == 8
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_can_08_a_deadline_that_passes_in_the_queue_computes_nothing(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "16", "--pool-pages", "600", "--max-context", "640"]
    with Cluster(tmp_path, tiny, worker_args=args, prefill_args=["--chunk-tokens", "2", "--max-running", "2"]) as cluster:
        async with cluster.client() as client:
            long = [asyncio.ensure_future(client.generate(prompt(600, seed=i), sampling={"max_tokens": 1})) for i in range(2)]
            await eventually(lambda: is_busy(client, "prefill", 2), within=5)
            began = time.monotonic()
            late = [client.call(prompt(600, seed=10 + i), timeout=0.5, sampling={"max_tokens": 1}) for i in range(50)]
            assert {await outcome(call) for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert time.monotonic() - began < 2
            await asyncio.gather(*long)
            began = time.monotonic()
            await client.generate(prompt(10), sampling={"max_tokens": 1})
            assert time.monotonic() - began < 2, "the expired ones, thousands of chunks, were prefilled first"
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
async def test_can_11_every_release_arrives_after_cancels_at_random_tokens(cluster: Cluster, client: Client) -> None:
    rng = random.Random(11)
    gate = asyncio.Semaphore(25)

    async def one(i: int) -> None:
        async with gate:
            call = client.call(prompt(rng.randint(1, 90), seed=i), sampling={"max_tokens": 60, "ignore_eos": True})
            try:
                for _ in range(rng.randint(0, 20)):
                    await call.read()
            finally:
                call.cancel()

    await asyncio.gather(*(one(i) for i in range(250)))
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
