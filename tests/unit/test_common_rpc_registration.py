"""Registration against a real registry service."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest

from common.address import Address
from common.errors import Incompatible
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from common.rpc.registration import Registration
from common.rpc.server import bind, make_server
from common.work import Compatibility, PageCounts, WorkerLoad, WorkerProfile
from common.worker_wire import load_from_pb, profile_from_pb
from router.fleet.registry import Registry
from router.fleet.registry_servicer import RegistryServicer
from tests.helpers.eventually import eventually
from tests.helpers.rpc import LOOPBACK

PROFILE = WorkerProfile(
    worker_id="decode-1", role="decode", address="127.0.0.1:9", device="cpu", total_pages=8, max_running=4, version="0",
    compatibility=Compatibility("f" * 16, "float32", 16, 128, 2, 2, 16),
)  # fmt: skip


class Router(registry_pb2_grpc.RegistryServiceServicer):
    """Accepts, unless told to refuse; keeps what it is told."""

    def __init__(self) -> None:
        self.statuses: asyncio.Queue[Any] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.refuse: Exception | None = None
        self.silent = False
        self.epoch = random.getrandbits(32)
        self.directives: asyncio.Queue[registry_pb2.RouterDirective] = asyncio.Queue()
        self.server = make_server()

    async def Register(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.statuses.put_nowait(await anext(requests))
        if self.refuse is not None:
            raise self.refuse
        if self.silent:
            await asyncio.Event().wait()
        reader = asyncio.create_task(self._read(requests))
        try:
            yield registry_pb2.RouterDirective(accepted=registry_pb2.Accepted(router_epoch=self.epoch))
            while True:
                getting = asyncio.create_task(self.directives.get())
                await asyncio.wait([getting, reader], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    return
                yield getting.result()
                if getting.result().HasField("goodbye"):
                    return
        finally:
            reader.cancel()
            self.gone.set()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for status in requests:
            self.statuses.put_nowait(status)

    async def start(self, address: Address = LOOPBACK) -> Address:
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, self.server)
        bound = await bind(self.server, address)
        await self.server.start()
        return bound

    async def next_status(self) -> Any:
        return await asyncio.wait_for(self.statuses.get(), 5)


@pytest.fixture
async def tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    """Cancelled at the end."""
    running: list[asyncio.Task[None]] = []
    yield running
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def routers() -> AsyncIterator[Callable[[], Router]]:
    """Makes routers; they are stopped at the end."""
    made: list[Router] = []

    def make() -> Router:
        made.append(Router())
        return made[-1]

    yield make
    for router in made:
        await router.server.stop(0)


Routers = Callable[[], Router]


def registration(*routers: Address, load: Any = WorkerLoad, interval: float = 60, told: list[Any] | None = None) -> Registration:
    told = [] if told is None else told
    return Registration(
        routers=routers,
        profile=PROFILE,
        load=load,
        on_drain=lambda grace, stay: told.append((grace, stay)),
        on_undrain=lambda: told.append("undrain"),
        interval=timedelta(seconds=interval),
    )


async def test_the_profile_comes_first_then_the_load_and_the_worker_counts_as_registered(
    routers: Routers, tasks: list[Any]
) -> None:
    router = routers()
    joined = registration(await router.start(), load=lambda: WorkerLoad(running=2, pages=PageCounts(5, 1, 1, 1, 8)))
    assert joined.registered == 0
    tasks.append(asyncio.create_task(joined.run()))
    assert profile_from_pb((await router.next_status()).profile) == PROFILE
    assert load_from_pb((await router.next_status()).load) == WorkerLoad(running=2, pages=PageCounts(5, 1, 1, 1, 8))
    await eventually(lambda: joined.registered == 1, within=5)


async def test_the_load_is_told_every_interval(routers: Routers, tasks: list[Any]) -> None:
    router = routers()
    tasks.append(asyncio.create_task(registration(await router.start(), interval=0.05).run()))
    for _ in range(4):
        await router.next_status()


async def test_a_change_is_told_at_once_and_many_changes_are_told_together(routers: Routers, tasks: list[Any]) -> None:
    router, counter = routers(), iter(range(1000))
    joined = registration(await router.start(), load=lambda: WorkerLoad(running=next(counter)), interval=60)
    tasks.append(asyncio.create_task(joined.run()))
    await router.next_status()
    await router.next_status()
    for _ in range(50):
        joined.changed()
        await asyncio.sleep(0.001)
    await router.next_status()
    await asyncio.sleep(0.1)
    assert router.statuses.qsize() <= 10


async def test_a_router_may_ask_the_worker_to_drain_and_to_undrain(routers: Routers, tasks: list[Any]) -> None:
    router, told = routers(), list[Any]()
    tasks.append(asyncio.create_task(registration(await router.start(), told=told).run()))
    for drain in (registry_pb2.Drain(grace_ms=1500), registry_pb2.Drain(stay=True)):
        router.directives.put_nowait(registry_pb2.RouterDirective(drain=drain))
    router.directives.put_nowait(registry_pb2.RouterDirective(undrain=registry_pb2.Undrain()))
    await eventually(lambda: told == [(timedelta(seconds=1.5), False), (None, True), "undrain"], within=5)


async def test_leaving_says_goodbye_after_the_last_report_and_warns_nobody(
    routers: Routers, tasks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    router, never = routers(), Address("127.0.0.1", 1)
    joined = registration(await router.start(), never)
    running = asyncio.create_task(joined.run())
    tasks.append(running)
    await eventually(lambda: joined.registered == 1, within=5)
    caplog.clear()
    began = time.monotonic()
    await joined.leave()
    assert time.monotonic() - began < 0.5, "a router that was never there is not waited for"
    kinds = [(await router.next_status()).WhichOneof("message") for _ in range(3)]
    assert kinds == ["profile", "load", "goodbye"]
    await asyncio.wait_for(running, 3)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_router_that_says_goodbye_is_no_warning_and_is_looked_for_again(
    routers: Routers, tasks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    router = routers()
    joined = registration(await router.start())
    tasks.append(asyncio.create_task(joined.run()))
    await eventually(lambda: joined.registered == 1, within=5)
    router.directives.put_nowait(registry_pb2.RouterDirective(goodbye=registry_pb2.Goodbye()))
    await asyncio.wait_for(router.gone.wait(), 2)
    await eventually(lambda: joined.registered == 1 and router.statuses.qsize() >= 4, within=5)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_flt_11_a_restarted_router_is_found_again(routers: Routers, tasks: list[Any]) -> None:
    first = routers()
    address = await first.start()
    joined = registration(address)
    tasks.append(asyncio.create_task(joined.run()))
    await eventually(lambda: joined.registered == 1, within=5)
    await first.server.stop(0)
    await eventually(lambda: joined.registered == 0, within=5)
    second = routers()
    await second.start(address)
    await eventually(lambda: joined.registered == 1, within=5)
    assert profile_from_pb((await second.next_status()).profile) == PROFILE


async def test_a_router_that_takes_the_profile_and_says_nothing_is_asked_anew(
    routers: Routers, tasks: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.rpc.registration.ANSWER_SECONDS", 0.3)
    router = routers()
    router.silent = True
    joined = registration(await router.start())
    tasks.append(asyncio.create_task(joined.run()))
    assert profile_from_pb((await router.next_status()).profile) == PROFILE
    router.silent = False
    await eventually(lambda: "it has not answered within 0.3 s" in caplog.text, within=5)
    monkeypatch.setattr("common.rpc.registration.ANSWER_SECONDS", 10.0)  # A busy machine may need more than that.
    await eventually(lambda: joined.registered == 1, within=5)


async def test_lif_08_a_router_may_start_after_its_worker_and_another_that_never_starts_does_no_harm(
    routers: Routers, tasks: list[Any]
) -> None:
    early, late = routers(), routers()
    address = await early.start()
    await early.server.stop(0)
    joined = registration(address, Address("127.0.0.1", 1))
    tasks.append(asyncio.create_task(joined.run()))
    await asyncio.sleep(0.3)
    assert joined.registered == 0
    await late.start(address)
    await eventually(lambda: joined.registered == 1, within=5)


async def test_cmp_01_a_refusal_is_logged_once_with_both_values_and_tried_again(
    routers: Routers, tasks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    router = routers()
    router.refuse = Incompatible("page_size", 16, 32, our_name="prefill-1", their_name="decode-1")
    joined = registration(await router.start())
    with caplog.at_level(logging.WARNING, logger="common.rpc.registration"):
        tasks.append(asyncio.create_task(joined.run()))
        await asyncio.sleep(0.7)
        router.refuse = None
        await eventually(lambda: joined.registered == 1, within=5)
    messages = [
        record for record in caplog.records if record.name == "common.rpc.registration" and record.levelno == logging.ERROR
    ]
    assert len(messages) == 1
    assert "page_size differs: 32 on decode-1, 16 on prefill-1" in messages[0].getMessage()


async def test_cancelling_ends_the_stream_which_the_router_sees(routers: Routers, tasks: list[Any]) -> None:
    router = routers()
    joined = registration(await router.start())
    task = asyncio.create_task(joined.run())
    await eventually(lambda: joined.registered == 1, within=5)
    task.cancel()
    await asyncio.wait_for(router.gone.wait(), 5)
    assert joined.registered == 0


async def test_a_load_that_cannot_be_read_is_not_hidden(routers: Routers) -> None:
    def broken() -> WorkerLoad:
        raise RuntimeError("no engine")

    router = routers()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(registration(await router.start(), load=broken).run(), 5)
    assert caught.group_contains(RuntimeError, match="no engine")


async def test_a_worker_without_routers_has_nothing_to_do() -> None:
    joined = registration()
    await asyncio.wait_for(joined.run(), 1)
    assert joined.registered == 0


async def test_a_router_that_is_named_twice_is_registered_with_once(
    tasks: list[asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """As HOST:PORT and by another name: each registration ended the other, for ever."""
    caplog.set_level(logging.INFO)
    server, registry = make_server(), Registry(fingerprint=PROFILE.compatibility.fingerprint)
    servicer = RegistryServicer(registry, epoch=7, silence=timedelta(seconds=60))
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)
    address = await bind(server, LOOPBACK)
    await server.start()
    try:
        twice = registration(address, Address("localhost", address.port), interval=0.05)
        tasks.append(asyncio.create_task(twice.run()))
        await eventually(lambda: "by another name: one registration is enough" in caplog.text, within=10)
        seen = caplog.text.count("registered with router")
        await asyncio.sleep(1)
        assert caplog.text.count("registered with router") == seen and twice.registered == 1
        assert [worker.id for worker in registry.live] == [PROFILE.worker_id]
        await twice.leave()
        await asyncio.wait_for(tasks[0], 10)
        assert caplog.text.count("registered with router") == seen, "by the name that is left over"
    finally:
        await server.stop(0)


async def test_what_answers_and_is_no_router_is_said_to_be_none(
    tasks: list[asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    address = await bind(server, LOOPBACK)
    await server.start()
    try:
        tasks.append(asyncio.create_task(registration(address).run()))
        said = f"no registration with router {address}, retrying: what answers there is no router"
        await eventually(lambda: said in caplog.text, within=10)
    finally:
        await server.stop(0)
