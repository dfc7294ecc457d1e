"""gRPC as the world uses it: pings, slow readers, big messages, odd addresses, health and reflection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.calls import rpcs_of
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import Process, free_port
from tests.helpers.prompts import prompt
from tests.helpers.relay import Relay

pytestmark = pytest.mark.faults

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
GENERATION = "pdserve.v1.GenerationService"
SMALL = ["--page-size", "4", "--pool-pages", "600", "--max-context", "1024"]
MESSAGE_LIMIT = 16 << 20


class Waits(NamedTuple):
    """Seconds."""

    ping: float
    silence: float
    idle: float


SHORT = Waits(ping=1, silence=3, idle=4)
LONG = Waits(ping=10, silence=45, idle=60)
FULL = pytest.param(LONG, marks=[pytest.mark.long, pytest.mark.timeout(400)])


def address_of(worker: Process) -> str:
    return worker.wait_for_line(r"worker ready on (\S+)")[1]


@pytest.mark.parametrize("waits", [SHORT, FULL], ids=["short", "long"])
async def test_grp_01_client_pings_during_a_long_silence_and_while_idle(tiny: Path, tmp_path: Path, waits: Waits) -> None:
    """A simulated prompt of 100 steps, which take as long as is said."""
    (profile := tmp_path / "profile.json").write_text(json.dumps({"prefill_base": waits.silence / 100}))
    options = [
        ("grpc.keepalive_time_ms", int(waits.ping * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    sim = ["--engine", "sim", "--sim-profile", str(profile)]
    with Cluster(tmp_path, tiny, worker_args=[*SMALL, *sim], prefill_args=["--chunk-tokens", "1"]) as cluster:
        async with Relay(cluster.address) as relay:
            channel = grpc.aio.insecure_channel(relay.address, options=options)
            async with Client(relay.address, channel=channel) as client:
                began = time.monotonic()
                await client.generate(prompt(100), sampling={"max_tokens": 2, "ignore_eos": True}, timeout=300)
                assert time.monotonic() - began > 0.9 * waits.silence, "there was no silence"
                sent = relay.passed_up
                await asyncio.sleep(waits.idle)
                assert relay.passed_up - sent >= 17 * (waits.idle // waits.ping - 1), "the client pinged while it was idle"
                await client.generate(prompt(5), sampling={"max_tokens": 2, "ignore_eos": True})
                assert relay.connections == 1, "the server has ended the first connection"
                await cluster.assert_idle(client)


async def test_grp_02_a_client_without_a_deadline_gets_a_status_when_the_server_gives_up(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, worker_args=[*SMALL, "--grace", "0s"], router_args=["--grace", "0s"]) as cluster:
        async with cluster.client() as client:
            waiting = await _open_stream(client)
            cluster.decode.pop().kill()
            assert await asyncio.wait_for(_status(waiting), 10) is grpc.StatusCode.UNAVAILABLE
            cluster.start_worker("decode")

            async def serves() -> bool:
                try:
                    return bool((await client.generate([1, 2], sampling={"max_tokens": 1, "ignore_eos": True})).ids)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    return False

            await eventually(serves, within=20)
            waiting = await _open_stream(client)
            cluster.router.signal(signal.SIGTERM)
            assert await asyncio.wait_for(_status(waiting), 10) is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(cluster.router.wait, within=10) == 0


async def _open_stream(client: Client) -> Any:
    call = client.call(prompt(5), sampling={"max_tokens": 1000, "ignore_eos": True}, timeout=None)  # type: ignore[arg-type]
    await first_event(call, "delta")
    return call


async def _status(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("taker", ["another program", "a router of ours"])
def test_grp_04_a_taken_port_ends_the_start(tiny: Path, tmp_path: Path, taker: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        if taker == "another program":
            taken.listen()
        else:
            taken.close()
            first = Process("router", ["--model", str(tiny), "--listen", address], log=tmp_path / "first")
            first.wait_for_line("listening on")
        process = Process("router", ["--model", str(tiny), "--listen", address], log=tmp_path / "log")
        assert process.wait(within=20) == 2
        assert process.output.splitlines()[-1] == f"error: cannot listen on {address}: address already in use"
        if taker != "another program":
            assert first.is_alive
            first.kill()


async def test_grp_06_messages_up_to_the_limit_get_the_ordinary_answer_and_larger_ones_the_limit(
    cluster: Cluster, client: Client
) -> None:
    big = [
        client.call("x" * 5_000_000),
        client.call([1] * 1_200_000),
        client.call([1, 2], stop=["s" * 1000] * 4200),
    ]
    for call in big:
        assert await call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
        assert "must" in (await call.details())
    too_big = client.call("x" * (MESSAGE_LIMIT + 1))
    assert await too_big.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MESSAGE_LIMIT) in (await too_big.details())
    await client.generate([1, 2], sampling={"max_tokens": 1, "ignore_eos": True})
    for role, worker in (("prefill", cluster.prefill[0]), ("decode", cluster.decode[0])):
        async with grpc.aio.insecure_channel(address_of(worker)) as channel:
            flush = next(rpc for rpc in rpcs_of(role) if rpc.path.endswith("/FlushPrefixCache"))
            for _ in range(2):
                call = flush.method(channel)(b"\x7a" + b"\xff" * (MESSAGE_LIMIT + 1), timeout=10)
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(MESSAGE_LIMIT) in (await call.details())
                await flush.method(channel)(b"", timeout=10)


async def test_compressed_requests_are_taken_and_none_is_inflated_beyond_the_limit(cluster: Cluster, client: Client) -> None:
    """gRPC itself inflates first: 100 MB in 100 kB."""
    gzip, deflate = grpc.Compression.Gzip, grpc.Compression.Deflate
    small = pb.TokenizeRequest(text="hello " * 1000)
    plain = await client.stub.Tokenize(small, timeout=10)
    assert await client.stub.Tokenize(small, timeout=10, compression=gzip) == plain
    call = client.stub.Tokenize(small, timeout=10, compression=deflate)
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED and "deflate" in (await call.details())

    bomb = b"\x0a" + bytes(100 << 20)
    addresses = {"router": cluster.address, "decode": address_of(cluster.decode[0])}
    targets = {"router": ("Tokenize", cluster.router), "decode": ("Push", cluster.decode[0])}
    for role, (name, process) in targets.items():
        rpc = next(rpc for rpc in rpcs_of(role) if rpc.path.endswith(f"/{name}"))
        before = psutil.Process(process.pid).memory_info().rss
        async with grpc.aio.insecure_channel(addresses[role]) as channel:
            call = rpc.method(channel)(iter([bomb]) if rpc.client_streams else bomb, timeout=30, compression=gzip)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MESSAGE_LIMIT) in (await call.details())
        grown = psutil.Process(process.pid).memory_info().rss - before
        assert grown < 70 << 20, f"{role} grew by {grown >> 20} MiB"


async def test_metadata_beyond_the_limit_is_refused_with_the_limit(client: Client) -> None:
    for size, code in ((10_000, grpc.StatusCode.OK), (20_000, grpc.StatusCode.RESOURCE_EXHAUSTED), (100, grpc.StatusCode.OK)):
        call = client.stub.GetModel(pb.GetModelRequest(), metadata=[("x-long", "y" * size)], timeout=5)
        assert await call.code() is code
        assert code is grpc.StatusCode.OK or "16384" in (await call.details())


async def test_hundreds_of_streams_on_one_connection(cluster: Cluster, client: Client) -> None:
    async with Relay(cluster.address) as relay, Client(relay.address) as many:
        stub: Any = health_pb2_grpc.HealthStub(many.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION), timeout=30) for _ in range(300)]
        assert {(await watch.read()).status for watch in watches} == {SERVING}
        answers = await asyncio.gather(
            *(many.generate(prompt(4, seed=i), sampling={"max_tokens": 3, "ignore_eos": True}) for i in range(200))
        )
        assert all(len(answer.ids) == 3 for answer in answers)
        assert relay.connections == 1
        for watch in watches:
            watch.cancel()


async def test_grp_08_a_cluster_of_unix_sockets_ipv6_and_names(tiny: Path, tmp_path: Path) -> None:
    router, ports = f"unix:{tmp_path}/router.sock", free_port()
    with Cluster(
        tmp_path, tiny, prefill=0, decode=0, worker_args=SMALL, prefill_args=["--transport", "grpc"], listen=router
    ) as cluster:
        listens = {
            "prefill": [f"unix:{tmp_path}/prefill.sock", "[::1]:0"],
            "decode": [f"unix:{tmp_path}/decode.sock", f"localhost:{ports}"],
        }
        for role, addresses in listens.items():
            for listen in addresses:
                cluster.start_worker(role, listen=listen)
        for worker in (*cluster.prefill, *cluster.decode):
            await asyncio.to_thread(cluster.wait_until_joined, worker)
        async with cluster.client() as client:
            await asyncio.gather(
                *(client.generate(prompt(9, seed=i), sampling={"max_tokens": 4, "ignore_eos": True}) for i in range(24))
            )
            named = {worker.address for worker in (await client.workers()).values()}
            assert {f"unix:{tmp_path}/prefill.sock", f"unix:{tmp_path}/decode.sock", f"localhost:{ports}"} < named
            assert any(address.startswith("[::1]:") for address in named)
            await cluster.assert_idle(client)
        cluster.close()
        assert not [entry.name for entry in os.scandir(tmp_path) if entry.name.endswith(".sock")], (
            "a process that ends well takes its socket along"
        )


async def test_grp_08_a_killed_process_s_unix_socket_is_taken_over_and_a_living_one_s_is_not(tiny: Path, tmp_path: Path) -> None:
    args = ["--model", str(tiny), "--listen", f"unix:{tmp_path}/s"]
    first = Process("router", args, log=tmp_path / "first")
    await asyncio.to_thread(first.wait_for_line, "listening on")
    second = Process("router", args, log=tmp_path / "second")
    assert await asyncio.to_thread(second.wait, within=20) == 2
    assert f"cannot listen on unix:{tmp_path}/s: address already in use" in second.output
    first.kill()
    third = Process("router", args, log=tmp_path / "third")
    try:
        await asyncio.to_thread(third.wait_for_line, "listening on")
        async with Client(f"unix:{tmp_path}/s") as client:
            assert (await client.model()).max_context
    finally:
        third.kill()


@pytest.mark.parametrize("bad", ["::1:50051", "unix:relative", "unix:"])
@pytest.mark.parametrize("module", ["router", "decode_worker"])
def test_grp_08_a_malformed_address_is_refused_at_start_naming_it(tiny: Path, tmp_path: Path, module: str, bad: str) -> None:
    process = Process(module, ["--model", str(tiny), "--listen", bad], log=tmp_path / "log")
    assert process.wait(within=20) == 2
    assert "--listen: must be host:port, [ipv6]:port or unix:/path" in process.output and bad in process.output


@asynccontextmanager
async def watching(address: str, service: str) -> AsyncIterator[Any]:
    """Health.Watch, from before there is a server."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        yield stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60, wait_for_ready=True)


async def test_grp_10_watch_tells_of_start_serving_and_drain_on_every_role(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, prefill=0, decode=0, worker_args=SMALL, listen=f"127.0.0.1:{free_port()}") as cluster:
        places = {
            "prefill": (f"127.0.0.1:{free_port()}", "pdserve.v1.PrefillService"),
            "decode": (f"127.0.0.1:{free_port()}", "pdserve.v1.DecodeService"),
        }
        async with watching(cluster.address, GENERATION) as router, watching(cluster.address, "no.such.Service") as unknown:
            assert (await router.read()).status == NOT_SERVING
            assert (await unknown.read()).status == SERVICE_UNKNOWN
            for role, (address, service) in places.items():
                async with watching(address, service) as worker, watching(address, "") as alive:
                    process = cluster.start_worker(role, listen=address)
                    assert (await alive.read()).status == SERVING
                    assert (await worker.read()).status in (NOT_SERVING, SERVING)
                    await asyncio.to_thread(cluster.wait_until_joined, process)
            assert (await router.read()).status == SERVING
            async with cluster.client() as client, watching(places["decode"][0], "pdserve.v1.HandoffService") as worker:
                assert (await worker.read()).status == SERVING
                running = await _open_stream(client)
                cluster.decode[0].signal(signal.SIGTERM)
                assert (await worker.read()).status == NOT_SERVING
                assert (await router.read()).status == NOT_SERVING, "while the stream still runs"
                last = await first_event(running, "finished")
                assert last.finished.usage.completion_tokens == 1000
            cluster.router.signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await router.read()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


def test_grp_11_everything_is_found_and_called_by_reflection_alone(cluster: Cluster) -> None:
    """As a plain gRPC tool does: no proto file, no generated code."""
    roles = {
        cluster.address: "router",
        address_of(cluster.prefill[0]): "prefill",
        address_of(cluster.decode[0]): "decode",
    }
    for address, role in roles.items():
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            listed = set(database.get_services())
            described = {f"/{service}/{name}" for service in listed for name in pool.FindServiceByName(service).methods_by_name}
            assert described >= {rpc.path for rpc in rpcs_of(role)}
            health = _call(channel, pool, "grpc.health.v1.Health", "Check")
            assert health == {"status": "SERVING"}
            if role == "router":
                assert _call(channel, pool, GENERATION, "GetModel")["vocab_size"] == 384


def _call(channel: grpc.Channel, pool: DescriptorPool, service: str, name: str) -> dict[str, Any]:
    method = pool.FindServiceByName(service).methods_by_name[name]
    call: Any = channel.unary_unary(
        f"/{service}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    answer = call(GetMessageClass(method.input_type)(), timeout=5)
    return dict(MessageToDict(answer, preserving_proto_field_name=True))


@pytest.fixture(scope="module")
def impatient(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ends clients that read nothing for 1 s. Its context is long enough for outputs that no window holds."""
    pool = ["--page-size", "16", "--pool-pages", "6000", "--max-running", "32"]
    with Cluster(
        tmp_path_factory.mktemp("impatient"), tiny, worker_args=pool, router_args=["--slow-client-timeout", "1s"]
    ) as running:
        yield running


@pytest.mark.timeout(120)
async def test_cap_05_clients_that_stop_reading_are_ended_hold_nothing_and_hold_up_nobody(impatient: Cluster) -> None:
    """20 streams of the longest output with all logprobs, of which nobody reads more than the first message."""
    rss = psutil.Process(impatient.router.pid).memory_info
    # Without these two the library's window grows until it takes all of an output that nobody reads.
    narrow = grpc.aio.insecure_channel(
        impatient.address, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    )
    async with Client(impatient.address, channel=narrow) as stalling, impatient.client() as reading:
        alone = await _pace(reading)
        before = rss().rss
        sampling = {"max_tokens": 1500, "ignore_eos": True}
        stalled = [stalling.call(prompt(4, seed=i), sampling=sampling, logprobs=20, timeout=100) for i in range(20)]
        await asyncio.gather(*(first_event(call, "started") for call in stalled))
        most = 0
        for _ in range(3):
            await _pace(reading)
            most = max(most, rss().rss - before)
        await impatient.assert_idle(reading, within=60)
        most = max(most, rss().rss - before)
        assert most < 50 << 20, f"{most / 2**20:.0f} MiB"
        assert await _pace(reading) < 10 * alone + 1, "neighbours go on as before"
        codes = [await asyncio.wait_for(_status(call), 20) for call in stalled]
        assert set(codes) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK}
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 15, codes
        print(f"alone {alone:.3f} s, RSS +{most / 2**20:.0f} MiB, {codes.count(grpc.StatusCode.OK)} of 20 had it all")


async def _pace(client: Client) -> float:
    """Seconds that five small streams take."""
    began = time.monotonic()
    answers = await asyncio.gather(
        *(client.generate(prompt(5, seed=i), sampling={"max_tokens": 60, "ignore_eos": True}) for i in range(5))
    )
    assert all(len(answer.ids) == 60 for answer in answers)
    return time.monotonic() - began
