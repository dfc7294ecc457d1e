"""Processes that are stopped, drained and started anew in order: nobody's request notices."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from tests.faults.conftest import COUNTING
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.load import Load, Stream, counted
from tests.helpers.process import ROOT, Process, free_port

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def client(four: Cluster) -> AsyncIterator[Client]:
    async with four.client() as connected:
        yield connected
        await four.assert_idle(connected, within=10)


def address_of(process: Process) -> str:
    return process.wait_for_line(r"worker ready on (\S+)")[1]


async def worker_at(client: Client, address: str) -> pb.Worker:
    response = await client.stub.GetCluster(pb.GetClusterRequest(), timeout=5)
    found: list[pb.Worker] = [worker for worker in response.workers if worker.address == address]
    assert found, f"no worker at {address}"
    return found[0]


async def health_of(address: str, service: str) -> Any:
    async with make_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


class Warnings:
    """What these processes have warned of since."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._seen = {process: len(process.output) for process in processes}

    def lines(self) -> list[str]:
        new = [line for process, seen in self._seen.items() for line in process.output[seen:].splitlines()]
        return [line for line in new if re.search("WARNING|ERROR|CRITICAL", line)]


async def replace(cluster: Cluster, worker: Process, *, address: str = "") -> None:
    """Stops a worker in order and starts another, at this address or any."""
    role, workers = ("prefill", cluster.prefill) if worker in cluster.prefill else ("decode", cluster.decode)
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait, within=40) == 0
    workers.remove(worker)
    successor = cluster.start_worker(role, listen=address)
    await asyncio.to_thread(cluster.wait_until_joined, successor)


async def test_a_rolling_restart_of_every_worker_under_load_fails_no_request(counting_model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, counting_model, prefill=2, decode=2, worker_args=COUNTING) as cluster:
        warnings = Warnings([cluster.router])
        async with cluster.client() as client:
            async with Load([client], streams=10, tokens=(5, 200), seconds=60) as load:
                await eventually(lambda: load.finished >= 20, within=20)
                for worker in [*cluster.prefill, *cluster.decode]:
                    finished = load.finished
                    await replace(cluster, worker)
                    await eventually(lambda finished=finished: load.finished > finished + 5, within=20)  # type: ignore[misc]
            assert load.failed == []
            assert warnings.lines() == [], "leaving in order is no news to warn of"
            await cluster.assert_idle(client, within=10)


async def test_a_worker_that_cannot_finish_in_time_hands_back_and_its_requests_go_on_elsewhere(
    counting_model: Path, tmp_path: Path
) -> None:
    with Cluster(tmp_path, counting_model, prefill=2, decode=2, worker_args=[*COUNTING, "--grace", "500ms"]) as cluster:
        async with cluster.client() as client:
            calls = [asyncio.ensure_future(client.generate([i], sampling={"max_tokens": 900}, timeout=60)) for i in range(8)]
            await asyncio.sleep(0.5)
            assert not any(call.done() for call in calls)
            leaving, warnings = [cluster.decode[0], cluster.prefill[0]], Warnings([cluster.router])
            began = time.monotonic()
            for worker in leaving:
                worker.signal(signal.SIGTERM)
            assert [await asyncio.to_thread(worker.wait, within=20) for worker in leaving] == [0, 0]
            assert time.monotonic() - began < 20
            for i, answer in enumerate(await asyncio.gather(*calls)):
                assert answer.ids == counted(i, 900)
            assert warnings.lines() == [], "no attempt has failed, and nobody is lost"
            await cluster.assert_idle(client)


async def test_one_pair_restarted_in_place_fails_no_request(counting_model: Path, tmp_path: Path) -> None:
    listen = {role: f"127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
    cluster = Cluster(tmp_path, counting_model, prefill=0, decode=0, worker_args=[*COUNTING, "--grace", "2s"])
    try:
        cluster.start_router()
        for role, address in listen.items():
            cluster.start_worker(role, listen=address)
        await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")
        async with cluster.client() as client, Load([client], streams=4, tokens=(5, 400), seconds=60) as load:
            await eventually(lambda: load.finished >= 10, within=20)
            for worker in (cluster.decode[0], cluster.prefill[0]):
                role = "prefill" if worker in cluster.prefill else "decode"
                await replace(cluster, worker, address=listen[role])
                finished = load.finished
                await eventually(lambda finished=finished: load.finished > finished + 5, within=20)  # type: ignore[misc]
        assert load.failed == []
    finally:
        cluster.close()


async def test_two_routers_restarted_one_by_one_fail_no_request_of_a_client_that_knows_both(
    counting_model: Path, tmp_path: Path
) -> None:
    second = f"127.0.0.1:{free_port()}"
    with Cluster(tmp_path, counting_model, worker_args=[*COUNTING, "--router", second]) as cluster:
        routers = {cluster.address: cluster.router, second: cluster.start_router_at(second)}
        await asyncio.to_thread(routers[second].wait_for_line, "router ready on")
        try:
            async with Client(cluster.address) as one, Client(second) as other:
                async with Load([one, other], streams=4) as load, Load([other, one], streams=4) as also:
                    for address in routers:
                        await eventually(lambda: min(load.finished, also.finished) >= 10, within=20)
                        warnings = Warnings([routers[address], *cluster.prefill, *cluster.decode])
                        routers[address].signal(signal.SIGTERM)
                        assert await asyncio.to_thread(routers[address].wait, within=40) == 0
                        assert warnings.lines() == []
                        routers[address] = cluster.start_router_at(address)
                        await asyncio.to_thread(routers[address].wait_for_line, "router ready on")
                        # Also for the clients' channels, which wait a moment before they connect anew.
                        for connected in (one, other):
                            await eventually(lambda connected=connected: _reaches(connected, 2), within=10)  # type: ignore[misc]
                        load.finished = also.finished = 0
                    await eventually(lambda: min(load.finished, also.finished) >= 10, within=20)
                assert load.failed + also.failed == []
            cluster.router = routers[cluster.address]
        finally:
            for router in routers.values():
                router.signal(signal.SIGTERM)
                await asyncio.to_thread(router.wait, within=10)


async def test_an_operator_drains_a_worker_and_takes_it_back(four: Cluster, client: Client) -> None:
    registry: Any = registry_pb2_grpc.RegistryServiceStub(client.channel)
    address = address_of(four.decode[0])
    worker = await worker_at(client, address)
    calls = [asyncio.ensure_future(client.generate([i], sampling={"max_tokens": 900}, timeout=60)) for i in range(8)]
    await asyncio.sleep(0.3)

    await registry.DrainWorker(registry_pb2.DrainWorkerRequest(worker_id=worker.id, grace_ms=200), timeout=5)

    await eventually(lambda: _is(client, address, "draining"), within=2)
    assert await health_of(address, "pdserve.v1.DecodeService") == NOT_SERVING
    answers = await asyncio.gather(*calls)
    assert all(answer.ids == counted(i, 900) for i, answer in enumerate(answers))
    assert max(answer.only.end.timing.attempts for answer in answers) == 2, "some have moved"
    for i in range(4):
        answer = await client.generate([i], sampling={"max_tokens": 5})
        assert answer.started is not None and answer.started.decode_worker != worker.id
    drained = await worker_at(client, address)
    assert (drained.state, drained.running, drained.held_pages) == ("draining", 0, 0)

    await registry.UndrainWorker(registry_pb2.UndrainWorkerRequest(worker_id=worker.id), timeout=5)

    await eventually(lambda: _is(client, address, "ready"), within=2)
    assert await health_of(address, "pdserve.v1.DecodeService") == SERVING
    used = {(await client.generate([i], sampling={"max_tokens": 5})).started.decode_worker for i in range(6)}  # type: ignore[union-attr]
    assert used, "it serves"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await registry.DrainWorker(registry_pb2.DrainWorkerRequest(worker_id="nobody"), timeout=5)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND and worker.id in (error.value.details() or "")


async def _reaches(client: Client, workers: int) -> bool:
    try:
        return len(await client.workers()) == workers
    except grpc.aio.AioRpcError:
        return False


async def _is(client: Client, address: str, state: str) -> bool:
    found = (await worker_at(client, address)).state
    assert found == state, found
    return True


async def test_an_operator_drains_a_worker_to_its_end(four: Cluster, client: Client) -> None:
    registry: Any = registry_pb2_grpc.RegistryServiceStub(client.channel)
    extra = four.start_worker("prefill")
    address = await asyncio.to_thread(address_of, extra)
    await asyncio.to_thread(four.wait_until_joined, extra)
    worker = await worker_at(client, address)
    await registry.DrainWorker(registry_pb2.DrainWorkerRequest(worker_id=worker.id, exit=True), timeout=5)
    assert await asyncio.to_thread(extra.wait, within=10) == 0
    four.prefill.remove(extra)
    await eventually(lambda: _is(client, address, "left"), within=2)


async def test_lif_01_a_router_told_to_stop_keeps_its_promise_to_running_calls(counting_model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, counting_model, worker_args=COUNTING, router_args=["--grace", "20s"]) as cluster:
        async with cluster.client() as client:
            calls = [client.call([i], sampling={"max_tokens": 600}) for i in range(8)]
            first = [await first_event(call, "delta") for call in calls]
            refusals = [asyncio.ensure_future(client.refusal([1], sampling={"top_p": 7.0})) for _ in range(4)]
            await asyncio.sleep(0)
            began = time.monotonic()
            cluster.router.signal(signal.SIGTERM)
            for code, message in await asyncio.gather(*refusals):
                assert code is grpc.StatusCode.INVALID_ARGUMENT and "top_p" in message
            await asyncio.to_thread(cluster.router.wait_for_line, "stopping")
            code, message = await client.refusal([1])
            assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in message
            for i, (call, event) in enumerate(zip(calls, first, strict=True)):
                rest = [token async for later in call for token in later.delta.token_ids]
                assert [*event.delta.token_ids, *rest] == counted(i, 600)
            assert await asyncio.to_thread(cluster.router.wait, within=20) == 0
            assert time.monotonic() - began < 20


async def test_a_router_that_stops_cancels_nobodys_call(counting_model: Path, tmp_path: Path) -> None:
    """Also not those that arrive as it closes."""
    with Cluster(tmp_path, counting_model, worker_args=COUNTING) as cluster:
        codes: Counter[grpc.StatusCode] = Counter()
        is_over = asyncio.Event()

        async def ask(client: Client) -> None:
            while not is_over.is_set():
                try:
                    await client.stub.GetModel(pb.GetModelRequest(), timeout=10)
                    codes[grpc.StatusCode.OK] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code()] += 1
                    await asyncio.sleep(0.001)

        async with AsyncExitStack() as open_clients:
            clients = [await open_clients.enter_async_context(cluster.client()) for _ in range(4)]
            askers = [asyncio.create_task(ask(client)) for client in clients for _ in range(3)]
            await eventually(lambda: codes[grpc.StatusCode.OK] > 500, within=20)
            cluster.router.signal(signal.SIGTERM)
            assert await asyncio.to_thread(cluster.router.wait, within=20) == 0
            refused = codes[grpc.StatusCode.UNAVAILABLE]
            await eventually(lambda: codes[grpc.StatusCode.UNAVAILABLE] > refused + 20, within=20)
            is_over.set()
            await asyncio.gather(*askers)
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, codes


async def test_lif_03_one_interrupt_drains_and_ends_an_endless_call(tiny: Path, tmp_path: Path) -> None:
    grace = ["--grace", "1s"]
    with Cluster(tmp_path, tiny, worker_args=[*COUNTING, *grace], router_args=grace) as cluster:
        async with cluster.client() as client:
            call = client.call([1], sampling={"max_tokens": 1000, "ignore_eos": True})
            await first_event(call, "delta")
            cluster.decode[0].pause()  # An endless answer: nothing more comes.
            began = time.monotonic()
            for process in cluster.processes:
                process.signal(signal.SIGINT)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in call:
                    pass
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began < 6
            cluster.decode[0].resume()
            codes = [await asyncio.to_thread(process.wait, within=10) for process in cluster.processes]
            assert codes == [0, 0, 0]


@pytest.mark.parametrize("how", ["no grace", "no decode worker"])
async def test_grp_02_a_client_without_a_deadline_gets_a_status_within_seconds(
    counting_model: Path, tmp_path: Path, how: str
) -> None:
    with Cluster(tmp_path, counting_model, worker_args=COUNTING, router_args=["--grace", "0s"]) as cluster:
        async with cluster.client() as client:
            call = client.call([1], sampling={"max_tokens": 1000}, timeout=None)  # type: ignore[arg-type]
            await first_event(call, "delta")
            began = time.monotonic()
            if how == "no grace":
                cluster.decode[0].pause()
                cluster.router.signal(signal.SIGTERM)
            else:
                cluster.decode.pop().kill()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in call:
                    pass
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() - began < 6
            if how == "no grace":
                cluster.decode[0].resume()
                assert await asyncio.to_thread(cluster.router.wait, within=5) == 0


@pytest.mark.parametrize("comes", [True, False])
async def test_while_a_crashed_worker_s_successor_loads_its_model_requests_wait_and_no_longer(
    counting_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """With the default --return-wait; --pair-wait is over long before the successor serves, or has died while it started."""
    with Cluster(tmp_path, counting_model, worker_args=COUNTING, router_args=["--pair-wait", "100ms"]) as cluster:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # It begins from nothing, so that it can be stopped before it serves.
        announced = cluster.router.output.count("a decode worker is starting")
        successor = cluster.start_worker("decode")
        await eventually(lambda: cluster.router.output.count("a decode worker is starting") > announced, within=20, every=0.01)
        successor.pause()
        assert "worker ready" not in successor.output
        async with cluster.client() as client:
            begun = Stream(client, 1, tokens=900)
            await begun.reaches(5)
            cluster.decode.pop(0).kill()
            later = Stream(client, 7, tokens=20)
            await asyncio.sleep(1.0)
            assert not begun.has_ended and not later.has_ended, "they wait"
            if comes:
                successor.resume()
                await asyncio.gather(begun.end(), later.end())
                await cluster.assert_idle(client)
                return
            cluster.decode.pop().kill()
            killed = time.monotonic()
            for stream in (begun, later):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stream.end()
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "decode" in str(error.value.details())
            assert time.monotonic() - killed < 15, "nobody comes any more"


async def test_everything_stopped_at_once_warns_of_nobody(counting_model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, counting_model, worker_args=COUNTING) as cluster:
        async with cluster.client() as client:
            await client.generate([1], sampling={"max_tokens": 5})
        warnings = Warnings(cluster.processes)
        for process in cluster.processes:
            process.signal(signal.SIGINT)
        assert [await asyncio.to_thread(process.wait, within=10) for process in cluster.processes] == [0, 0, 0]
        assert warnings.lines() == []
