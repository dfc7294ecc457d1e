"""Every RPC of every process against hostile input: nothing crashes, hangs or leaks, and honest callers go on.

    FUZZ_SEED=7 make test-faults TESTS=tests/faults/test_fuzz.py        the same input again
    make test-faults-long TESTS=tests/faults/test_fuzz.py               minutes of it, from a seed that is drawn

The RPCs come from the descriptors, and the processes are asked by reflection which of them they serve.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from common.handoff.base import page_checksum
from common.rpc.gen.pdserve.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    handoff_pb2,
    prefill_pb2,
    registry_pb2,
    work_pb2,
)
from common.worker_wire import compatibility_to_pb
from tests.helpers.calls import Rpc, rpcs
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.fuzz import Fuzz, is_malformed
from tests.helpers.process import Process
from tests.helpers.prompts import prompt
from tests.helpers.router_stand import compatibility

pytestmark = pytest.mark.faults

SHORT_SECONDS, LONG_SECONDS = 8.0, 240.0
CALLERS = 12
CALL_SECONDS = 0.7
"""Of each hostile call; one that outlives its deadline by the same again hangs."""
RSS_GROWTH = 150 << 20
POOL = ["--page-size", "4", "--pool-pages", "600", "--max-context", "512", "--max-running", "32"]
PAGE = bytes(4 * 512)
"""The bytes of a page of four tokens of the tiny model."""
EPOCH = 77
"""Of the router that the hostile callers say they are."""
ENDS_WORKERS = ("/pdserve.v1.RegistryService/DrainWorker",)
"""What makes a worker leave, as it should: not called with the id of one that the test needs."""
BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
"""What no input may cause: handlers that fell over."""


@pytest.fixture(scope="module")
def target(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """By gRPC and by shared memory; short leases, so that what is left over ends while the test looks."""
    with Cluster(
        tmp_path_factory.mktemp("fuzzed"),
        tiny,
        prefill=2,
        worker_args=POOL,
        decode_args=["--lease", "2s"],
        prefill_args=["--request-timeout", "10s"],
        router_args=["--pair-wait", "1s", "--max-in-flight", "256"],
    ) as running:
        yield running


def address_of(worker: Process) -> str:
    return worker.wait_for_line(r"worker ready on (\S+)")[1]


def served_at(address: str) -> list[Rpc]:
    """The RPCs of a running process, by its own account."""
    with grpc.insecure_channel(address) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert services <= {rpc.service for rpc in rpcs()}, "a service whose descriptor the fuzz does not find"
    return [rpc for rpc in rpcs() if rpc.service in services]


def honest_messages(model: Path) -> tuple[Message, ...]:
    """What a right caller would send, for the fuzz to spoil a little."""
    ours = compatibility_to_pb(compatibility(model, page_size=4, max_context=512))
    key = work_pb2.WorkKey(router_epoch=EPOCH, uid=1, attempt=1)
    sampling = generation_pb2.SamplingParams(max_tokens=4, seed=1)
    req = work_pb2.Req(
        key=key, input_ids=b"\x01\0\0\0" * 9, prompt_len=9, output_len=4, sampling=sampling, n=1, request_id="r", deadline_ms=1000
    )
    hello = prefill_pb2.SessionHello(router_epoch=EPOCH)
    return (
        generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]), sampling=sampling),
        generation_pb2.GenerateRequest(text="hello", n=3, stop=["e"], logprobs=3, sampling=sampling),
        registry_pb2.WorkerStatus(
            profile=registry_pb2.WorkerProfile(
                worker_id="stranger", role="decode", address="127.0.0.1:1", compatibility=ours, device="cpu", total_pages=9
            )
        ),
        registry_pb2.WorkerStatus(load=registry_pb2.WorkerLoad(running=1)),
        prefill_pb2.PrefillSessionRequest(hello=hello),
        prefill_pb2.PrefillSessionRequest(submit=prefill_pb2.Submit(req=req, decode_address="127.0.0.1:1", decode_worker="d")),
        prefill_pb2.PrefillSessionRequest(cancel=prefill_pb2.CancelWork(uid=1, attempt=1)),
        decode_pb2.DecodeSessionRequest(hello=hello),
        decode_pb2.DecodeSessionRequest(cancel=prefill_pb2.CancelWork(uid=1, attempt=1)),
        decode_pb2.DecodeSessionRequest(prefill=decode_pb2.Prefill(req=req)),
        decode_pb2.DecodeSessionRequest(inquire=decode_pb2.Inquire(uid=1, attempt=1)),
        decode_pb2.PairRequest(prefill_worker="stranger", compatibility=ours),
        decode_pb2.ReserveRequest(req=req, transport="grpc"),
        decode_pb2.CommitRequest(first_tokens=[work_pb2.Token(uid=1, attempt=1, token_id=5)], pages_sent=3),
        *(handoff_pb2.KvFrame(page_index=index, data=PAGE, crc32=page_checksum(PAGE)) for index in range(3)),
    )


class Attack:
    """One process under fire."""

    def __init__(self, address: str, *, fuzz: Fuzz, honest: tuple[Message, ...], workers: Collection[str]) -> None:
        """workers: ids of the real ones."""
        self.address = address
        self.served = served_at(address)
        self.fuzz = fuzz
        self.honest = honest
        self.workers = [worker.encode() for worker in workers]
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []

    async def run(self, until: float) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            await asyncio.gather(*(self._caller(channel, until) for _ in range(CALLERS)))

    async def _caller(self, channel: grpc.aio.Channel, until: float) -> None:
        while time.monotonic() < until:
            rpc = self.fuzz.rng.choice(self.served)
            payloads = [self.fuzz.payload(rpc.request, seeds=self.honest) for _ in range(self._count(rpc))]
            if rpc.client_streams and self.fuzz.rng.random() < 0.4:
                payloads = self.fuzz.script(rpc.request, self.honest) + payloads
            if rpc.path in ENDS_WORKERS and any(worker in payload for worker in self.workers for payload in payloads):
                continue
            await self._call(channel, rpc, payloads)

    def _count(self, rpc: Rpc) -> int:
        return self.fuzz.rng.choice((0, 1, 2, 3, 8, 40)) if rpc.client_streams else 1

    async def _call(self, channel: grpc.aio.Channel, rpc: Rpc, payloads: list[bytes]) -> None:
        call = rpc.method(channel)(*([] if rpc.client_streams else payloads), timeout=CALL_SECONDS)
        try:
            async with asyncio.timeout(2 * CALL_SECONDS + 5):
                await self._talk(call, rpc, payloads)
                code = await call.code()
        except TimeoutError:
            self.faults.append(f"{rpc.path} did not end: {[payload[:80].hex() for payload in payloads]}")
            call.cancel()
            return
        details = await call.details() or ""
        self.outcomes[rpc.path, code.name] += 1
        if code in BUGS and "Internal error from Core" not in details and "RST_STREAM" not in details:
            self.faults.append(f"{rpc.path}: {code.name} {details}: {[payload[:80].hex() for payload in payloads]}")
        if not rpc.client_streams and is_malformed(rpc.request, payloads[0]) and code is grpc.StatusCode.OK:
            self.faults.append(f"{rpc.path} took what is no message: {payloads[0][:80].hex()}")

    async def _talk(self, call: Any, rpc: Rpc, payloads: list[bytes]) -> None:
        try:
            if rpc.client_streams:
                reading = asyncio.ensure_future(self._read(call, rpc))
                try:
                    for payload in payloads:
                        await call.write(payload)
                        await asyncio.sleep(self.fuzz.rng.choice((0, 0, 0.005)))
                    match self.fuzz.rng.randrange(4):
                        case 0:
                            call.cancel()
                        case 1:
                            pass  # Says nothing more, and waits.
                        case _:
                            await call.done_writing()
                finally:
                    await asyncio.gather(reading, return_exceptions=True)
            else:
                await self._read(call, rpc)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # grpc has several for a stream that is over.

    async def _read(self, call: Any, rpc: Rpc) -> None:
        if not rpc.server_streams:
            self.fuzz.learn_bytes(rpc.response, await call)
            return
        for _ in range(self.fuzz.rng.choice((1, 5, 1000))):
            if (data := await call.read()) is grpc.aio.EOF:
                return
            self.fuzz.learn_bytes(rpc.response, data)
        call.cancel()


@pytest.mark.timeout(120)
async def test_hostile_input_to_every_rpc_short(target: Cluster, tiny: Path) -> None:
    await attack_all(target, tiny, seed=int(os.environ.get("FUZZ_SEED", "1")), seconds=SHORT_SECONDS)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_hostile_input_to_every_rpc_long(target: Cluster, tiny: Path) -> None:
    seed = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    await attack_all(target, tiny, seed=seed, seconds=LONG_SECONDS)


async def attack_all(target: Cluster, model: Path, *, seed: int, seconds: float) -> None:
    print(f"FUZZ_SEED={seed}")
    processes = [psutil.Process(process.pid) for process in target.processes]
    async with target.client() as client:
        await asyncio.gather(*(client.generate(prompt(9, seed=i), sampling={"max_tokens": 8}) for i in range(8)))
        before = [(process.memory_info().rss, process.num_fds(), process.num_threads()) for process in processes]
        addresses = [target.address, address_of(target.prefill[0]), address_of(target.decode[0])]
        honest = honest_messages(model)
        fuzz = Fuzz(seed)
        workers = set(await client.workers())
        attacks = [Attack(address, fuzz=fuzz, honest=honest, workers=workers) for address in addresses]
        until = time.monotonic() + seconds
        keeper = asyncio.ensure_future(_keep_session(addresses[2]))
        health = asyncio.ensure_future(_slowest_health(addresses, until))
        await asyncio.gather(*(attack.run(until) for attack in attacks))
        slowest = await health
        keeper.cancel()

        faults = [fault for attack in attacks for fault in attack.faults]
        calls: Counter[tuple[str, str]] = sum((attack.outcomes for attack in attacks), Counter())
        print("\n".join(f"{count:6} {path} {code}" for (path, code), count in sorted(calls.items())))
        assert not faults, f"FUZZ_SEED={seed}: {len(faults)} faults, of them\n" + "\n".join(faults[:5])
        assert {path for path, _ in calls} == {rpc.path for attack in attacks for rpc in attack.served}, "some RPC got no call"
        assert slowest < 3, f"health took {slowest:.1f} s"
        await _recovers(target, client)
        for process, (rss, fds, threads) in zip(processes, before, strict=True):
            now = process.memory_info().rss
            assert now - rss < RSS_GROWTH, f"{process.name()} grew by {(now - rss) / 2**20:.0f} MiB"
            await eventually(lambda p=process, n=fds: p.num_fds() <= n + 16, within=5)  # type: ignore[misc]
            assert process.num_threads() <= threads + 40, "asyncio's pool has at most 32"


async def _keep_session(address: str) -> None:
    """The strangers' router has a session with the decode worker most of the time, so that their Reserves are considered."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        while True:
            call = stub.Session()
            try:
                await call.write(decode_pb2.DecodeSessionRequest(hello=prefill_pb2.SessionHello(router_epoch=EPOCH)))
                while await call.read() is not grpc.aio.EOF:
                    pass
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            await asyncio.sleep(0.05)


async def _slowest_health(addresses: list[str], until: float) -> float:
    """Of the processes under attack; each answer in time."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    slowest = 0.0
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < until - (len(addresses) - addresses.index(address) - 1) * 2:
                began = time.monotonic()
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.1)
    return slowest


async def _recovers(target: Cluster, client: Client) -> None:
    """Nobody has died or crashed, every page is accounted for, and honest work is done, all of it, as before."""
    for process in target.processes:
        assert process.is_alive, process.output[-3000:]
        assert "Traceback" not in process.output, _last_traceback(process)

    async def serves() -> bool:
        workers = (await client.workers()).values()
        if sum(worker.state == "ready" for worker in workers) != 3:
            return False
        return len((await client.generate(prompt(9), sampling={"max_tokens": 8, "ignore_eos": True}, timeout=10)).ids) == 8

    async def serves_or_not_yet() -> bool:
        try:
            return await serves()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False

    await eventually(serves_or_not_yet, within=20)
    await target.capacity_probe(client, within=15)


def _last_traceback(process: Process) -> str:
    output = process.output
    return output[output.rindex("Traceback") - 500 :][:3000]
