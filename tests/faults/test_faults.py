"""Workers that are killed, stopped, cut off or started anew while requests are in each of their states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.faults.conftest import COUNTING
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.load import Load, Stream, counted
from tests.helpers.process import Process, free_port
from tests.helpers.relay import Relay
from tests.helpers.relayed import CutOff

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

FOREVER = {"max_tokens": 900}
ROLES = ("prefill", "decode")
NOTICED = 2.0
"""Seconds until a stopped or cut-off worker is known to be one."""


@pytest.fixture
async def client(four: Cluster) -> AsyncIterator[Client]:
    async with four.client() as connected:
        yield connected
        await eventually(lambda: states_are(connected, ["ready"] * 4), within=15)
        await four.assert_idle(connected, within=15)


async def states_are(client: Client, expected: list[str]) -> bool:
    found = sorted(worker.state for worker in (await client.workers()).values())
    assert found == expected, found
    return True


async def worker_id(process: Process) -> str:
    """As its registration says."""
    found = await asyncio.to_thread(process.wait_for_line, r"worker ready on (\S+)")
    return found[1]


async def by_address(client: Client, address: str) -> pb.Worker:
    (worker,) = [worker for worker in (await client.workers()).values() if worker.address == address]
    return worker


@pytest.mark.quiet
@pytest.mark.parametrize("role", ROLES)
async def test_a_stopped_worker_s_requests_move_at_once_and_it_comes_back_with_every_page(
    four: Cluster, client: Client, role: str
) -> None:
    # Long prompts, so that some are in the prefill worker when it stops.
    streams = [Stream(client, i, tokens=400, context=600 if i % 2 else 0) for i in range(8)]
    await streams[0].reaches(20)
    victim = (four.prefill if role == "prefill" else four.decode)[0]
    address = await worker_id(victim)
    victim.pause()
    try:
        await eventually(lambda: _state(client, address, "unreachable", "lost"), within=NOTICED, is_bound=True)
        for stream in streams:
            await stream.end()
        answer = await client.generate([7], sampling={"max_tokens": 20})
        assert answer.ids == counted(7, 20) and answer.only.end.timing.attempts == 1, "nothing is placed on it"
    finally:
        victim.resume()
    await eventually(lambda: _state(client, address, "ready"), within=10)


async def _state(client: Client, address: str, *expected: str) -> bool:
    response = await client.stub.GetCluster(pb.GetClusterRequest(), timeout=5)
    found = [worker.state for worker in response.workers if worker.address == address]
    assert set(found) & set(expected), found
    return True


async def _is_busy(client: Client, address: str) -> bool:
    (worker,) = [worker for worker in (await client.workers()).values() if worker.address == address]
    return bool(worker.running)


@pytest.mark.parametrize("seconds", [2.5, pytest.param(9.0, marks=pytest.mark.long)])
async def test_a_router_that_was_stopped_goes_on_with_every_call(four: Cluster, client: Client, seconds: float) -> None:
    """Longer than a worker's silence, so that its own must not be taken for theirs; and longer than workers wait for a router."""
    streams = [Stream(client, i) for i in range(6)]
    await streams[0].reaches(20)
    four.router.pause()
    await asyncio.sleep(seconds)
    four.router.resume()
    for stream in streams:
        await stream.end()
    assert four.router.is_alive


@pytest.mark.parametrize("role", ROLES)
async def test_hnd_09_a_worker_that_is_cut_off_loses_its_requests_at_once_and_comes_back(
    four: Cluster, client: Client, role: str
) -> None:
    async with CutOff(four, role) as far:
        await eventually(lambda: _state(client, far.address, "ready"), within=5)
        streams = [Stream(client, i, tokens=300, context=700) for i in range(12)]
        await eventually(lambda: _is_busy(client, far.address), within=5, every=0.01)
        far.cut()
        await eventually(lambda: _state(client, far.address, "unreachable", "lost"), within=NOTICED)
        for stream in streams:
            await stream.end()
        far.mend()
        await eventually(lambda: _state(client, far.address, "ready"), within=15)

        async def is_empty() -> bool:
            worker = await by_address(client, far.address)
            assert (worker.running, worker.waiting, worker.held_pages, worker.quarantined_pages) == (0, 0, 0, 0), worker
            return True

        await eventually(is_empty, within=15)
    await eventually(lambda: _state(client, far.address, "left"), within=3)


@pytest.mark.quiet
async def test_a_worker_that_is_busy_is_not_taken_for_silent(four: Cluster, client: Client) -> None:
    """Prompts as long as they may be, one after the other, in engines that share their interpreter with the event loop."""
    before = [process.output for process in four.processes]
    await asyncio.gather(
        *(client.generate([(i + j) % 250 for j in range(1000)], sampling={"max_tokens": 2}, timeout=60) for i in range(40))
    )
    for process, earlier in zip(four.processes, before, strict=True):
        assert "WARNING" not in process.output[len(earlier) :], process.output[len(earlier) :]
    cluster = (await client.stub.GetCluster(pb.GetClusterRequest())).workers
    assert {worker.circuit for worker in cluster if worker.state == "ready"} == {"closed"}


MISTAKES: list[dict[str, Any]] = [
    {"prompt": [1] * 1024},
    {"prompt": [10_000_000]},
    {"prompt": [1], "sampling": {"top_p": 7.0}},
    {"prompt": []},
]


async def test_flt_07_client_mistakes_do_not_mark_a_worker_as_broken(four: Cluster, client: Client) -> None:
    for mistake in MISTAKES:
        calls = [client.refusal(mistake["prompt"], sampling=mistake.get("sampling", {"max_tokens": 4})) for _ in range(50)]
        for code, _ in await asyncio.gather(*calls):
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
        assert (await client.generate([3], sampling={"max_tokens": 4})).ids == counted(3, 4)
    workers = (await client.workers()).values()
    assert {(worker.state, worker.circuit) for worker in workers} == {("ready", "closed")}


async def test_flt_09_all_workers_die_under_load_and_others_come(counting_model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, counting_model, worker_args=COUNTING, patience="") as cluster:
        async with cluster.client() as client:
            pid = cluster.router.pid
            async with Load([client]) as load:
                await eventually(lambda: load.finished >= 20, within=20)
                for worker in (*cluster.prefill, *cluster.decode):
                    worker.kill()
                cluster.prefill.clear()
                cluster.decode.clear()
                gap_began = time.monotonic()
                await eventually(lambda: load.failed, within=10)
                assert time.monotonic() - gap_began < 5, "a gap is told quickly"
                for role in ROLES:
                    cluster.start_worker(role)
                await eventually(lambda: states_are(client, ["ready", "ready"]), within=30)
                back, finished = time.monotonic(), load.finished
                await eventually(lambda: load.finished > finished + 50, within=20)
            assert all("UNAVAILABLE" in error for _, error in load.failed)
            assert not [error for at, error in load.failed if at > back + 5]
            assert cluster.router.pid == pid and cluster.router.is_alive
            await cluster.assert_idle(client)


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.long)])
async def test_flt_11_a_router_killed_and_started_again_finds_all_its_workers(
    counting_model: Path, tmp_path: Path, times: int
) -> None:
    with Cluster(tmp_path, counting_model, prefill=2, decode=2, worker_args=COUNTING, patience="") as cluster:
        for _ in range(times):
            async with cluster.client() as client:
                streams: list[Any] = []
                used = set[str]()
                while len(used) < 4:
                    streams.append(client.call([len(streams)], sampling=FOREVER))
                    started = (await first_event(streams[-1], "started")).started
                    used |= {started.prefill_worker, started.decode_worker}
                cluster.router.kill()
                for stream in streams:
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        async for _ in stream:
                            pass
                    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            cluster.start_router()
            await asyncio.to_thread(cluster.router.wait_for_line, "listening on")
            async with cluster.client() as client:
                await eventually(lambda: states_are(client, ["ready"] * 4), within=5)
                await cluster.assert_idle(client)


async def test_flt_01_a_prefill_worker_started_again_at_its_address_is_used_at_once(four: Cluster, client: Client) -> None:
    listen = f"127.0.0.1:{free_port()}"
    first = four.start_worker("prefill", listen=listen)
    await asyncio.to_thread(four.wait_until_joined, first)
    async with Load([client], streams=6, tokens=(1, 5)) as load:
        await eventually(lambda: load.finished >= 30, within=20)
        four.prefill.remove(first)
        first.kill()
        second = four.start_worker("prefill", listen=listen)
        await asyncio.to_thread(four.wait_until_joined, second)
        finished = load.finished
        await eventually(lambda: load.finished >= finished + 20, within=10)
    assert not load.failed
    four.prefill.remove(second)
    assert await asyncio.to_thread(second.stop) == 0


async def test_a_registration_that_breaks_alone_moves_nothing(counting_model: Path, tmp_path: Path) -> None:
    """The worker registers again, over and over, while its session stands."""
    with Cluster(tmp_path, counting_model, prefill=0, decode=0, worker_args=COUNTING) as cluster:
        async with Relay(cluster.address) as registrations, cluster.client() as client:
            for role in ROLES:
                cluster.start_worker(role, router=registrations.address)
            await eventually(lambda: states_are(client, ["ready", "ready"]), within=40)
            ids = set(await client.workers())
            streams = [Stream(client, i, tokens=900) for i in range(4)]
            for stream in streams:
                await stream.reaches(10)
            for times in (1, 2, 3):
                registrations.cut()
                again = "has registered again; its session stood"
                await eventually(lambda: cluster.router.output.count(again) >= 2 * times, within=20)  # noqa: B023
            for stream in streams:
                await stream.end()
            assert [stream.attempts for stream in streams] == [1] * 4
            assert set(await client.workers()) == ids
            await cluster.assert_idle(client)


async def test_flt_13_an_address_that_drops_packets_holds_up_nobody(four: Cluster, client: Client) -> None:
    async with CutOff(four, "decode") as far:
        far.cut()
        began = time.monotonic()
        answers = await asyncio.gather(*(client.generate([i], sampling={"max_tokens": 30}) for i in range(20)))
        assert all(answer.ids == counted(i, 30) for i, answer in enumerate(answers))
        assert time.monotonic() - began < 20
        began = time.monotonic()
        for i in range(5):
            await client.generate([i], sampling={"max_tokens": 5})
        assert time.monotonic() - began < 3, "once it is known nobody waits for it"
