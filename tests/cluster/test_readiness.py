"""Health, reflection, start-up order and taken ports: what an orchestrator and a newcomer rely on."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import Process, free_port
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = "pdserve.v1.GenerationService"
POOL = ("--page-size", "4", "--pool-pages", "64", "--max-context", "128")


async def health(address: str, service: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


def address_of(worker: Process) -> str:
    return worker.wait_for_line(r"worker ready on (\S+)")[1]


async def test_grp_10_health_of_every_service_on_every_process(cluster: Cluster) -> None:
    expected = {
        cluster.address: ["", GENERATION, "pdserve.v1.RegistryService"],
        address_of(cluster.prefill[0]): ["", "pdserve.v1.PrefillService"],
        address_of(cluster.decode[0]): ["", "pdserve.v1.DecodeService", "pdserve.v1.HandoffService"],
    }
    for address, services in expected.items():
        for service in services:
            assert await health(address, service) == SERVING, (address, service)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(address, "pdserve.v1.NoSuchService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_grp_11_reflection_lists_and_describes_every_public_service(cluster: Cluster) -> None:
    def services(address: str) -> set[str]:
        with grpc.insecure_channel(address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {GENERATION, "grpc.health.v1.Health"} <= await asyncio.to_thread(services, cluster.address)
    assert "pdserve.v1.PrefillService" in await asyncio.to_thread(services, address_of(cluster.prefill[0]))
    assert "pdserve.v1.DecodeService" in await asyncio.to_thread(services, address_of(cluster.decode[0]))


async def test_lif_08_readiness_follows_the_workers_in_any_order(tiny: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tiny, worker_args=POOL)
    try:
        decode = cluster.start_worker("decode")
        await asyncio.to_thread(decode.wait_for_line, "decode worker ready on")
        cluster.start_router()
        await asyncio.to_thread(cluster.router.wait_for_line, "decode worker .* registered")
        assert await health(cluster.address, "") == SERVING and await health(cluster.address, GENERATION) == NOT_SERVING
        async with cluster.client() as client:
            code, message = await client.refusal([1, 2], timeout=10)
            assert code is grpc.StatusCode.UNAVAILABLE and "prefill" in message
            async with grpc.aio.insecure_channel(cluster.address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION), timeout=60)
                assert (await watch.read()).status == NOT_SERVING
                prefill = cluster.start_worker("prefill", extra=["--router", "127.0.0.1:1"])  # The second one never starts.
                assert (await watch.read()).status == SERVING
                await client.generate([1, 2], sampling={"max_tokens": 3})
                await asyncio.to_thread(prefill.wait_for_line, "no registration with router 127.0.0.1:1")
                prefill.kill()
                cluster.prefill.remove(prefill)
                assert (await watch.read()).status == NOT_SERVING
    finally:
        cluster.close()


@pytest.mark.parametrize("module", ["router", "prefill_worker", "decode_worker"])
def test_grp_04_a_taken_port_is_a_clear_error(tiny: Path, tmp_path: Path, module: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        args = ["--model", str(tiny), "--listen", address] + ([] if module == "router" else ["--router", "127.0.0.1:1"])
        process = Process(module, args, log=tmp_path / "log")
        assert process.wait(within=20) == 2
    assert address in process.output and "in use" in process.output and "Traceback" not in process.output


@pytest.mark.parametrize("bad", ["::1:50051", "localhost", "127.0.0.1:99999", "host:port"])
def test_grp_08_a_malformed_address_is_refused_at_start(tiny: Path, tmp_path: Path, bad: str) -> None:
    process = Process("router", ["--model", str(tiny), "--listen", bad], log=tmp_path / "log")
    assert process.wait(within=10) == 2
    assert bad in process.output and "Traceback" not in process.output


async def test_grp_08_ipv6_everywhere(tiny: Path, tmp_path: Path) -> None:
    address = f"[::1]:{free_port()}"
    processes = [Process("router", ["--model", str(tiny), "--listen", address], log=tmp_path / "router")]
    try:
        for role, listen in (("prefill", "[::1]:0"), ("decode", "[::1]:0")):
            args = ["--model", str(tiny), "--listen", listen, "--router", address, *POOL]
            processes.append(Process(f"{role}_worker", args, log=tmp_path / role))
        await asyncio.to_thread(processes[0].wait_for_line, r"router ready on \[::1\]:\d+")
        async with Client(address) as client:
            await client.generate(prompt(5), sampling={"max_tokens": 4})
            assert all(worker.address.startswith("[::1]:") for worker in (await client.workers()).values())
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_lif_01_and_03_a_router_that_stops_lets_running_calls_finish(tiny: Path, tmp_path: Path, number: int) -> None:
    with Cluster(tmp_path, tiny, worker_args=["--page-size", "4", "--pool-pages", "1200", "--max-context", "1024"]) as cluster:
        async with cluster.client() as client:
            calls = [client.call(prompt(5, seed=i), sampling={"max_tokens": 800, "ignore_eos": True}) for i in range(4)]
            await asyncio.gather(*(first_event(call, "delta") for call in calls))
            cluster.router.signal(number)
            await eventually(
                lambda: "stopping" in cluster.router.output.lower() or "drain" in cluster.router.output.lower(), within=5
            )
            finished = await asyncio.gather(*(first_event(call, "finished") for call in calls))
            assert all(event.finished.usage.completion_tokens == 800 for event in finished)
        assert cluster.router.wait(within=20) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_stops_gives_its_requests_back_and_exits_0(tiny: Path, tmp_path: Path, role: str) -> None:
    args = ["--page-size", "4", "--pool-pages", "300", "--max-context", "1024", "--grace", "0s"]
    with Cluster(tmp_path, tiny, prefill=2, decode=2, worker_args=args) as cluster:
        async with cluster.client() as client:
            calls = [
                asyncio.ensure_future(client.generate(prompt(9, seed=i), sampling={"max_tokens": 200, "ignore_eos": True}))
                for i in range(8)
            ]
            await asyncio.sleep(0.15)
            leaving = (cluster.prefill if role == "prefill" else cluster.decode)[0]
            leaving.signal(signal.SIGTERM)
            assert all(len(answer.ids) == 200 for answer in await asyncio.gather(*calls))
            assert await asyncio.to_thread(leaving.wait, within=10) == 0
            (cluster.prefill if role == "prefill" else cluster.decode).remove(leaving)
            await cluster.assert_idle(client)


async def test_lif_06_a_killed_worker_leaves_no_process_behind(tiny: Path, tmp_path: Path) -> None:
    import psutil

    with Cluster(tmp_path, tiny, worker_args=POOL) as cluster:
        for victim in (cluster.prefill.pop(), cluster.decode.pop()):
            children = psutil.Process(victim.pid).children(recursive=True)
            victim.kill()
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
            assert not alive
