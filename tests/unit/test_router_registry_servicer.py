"""Which registration an operator's directive reaches, and that none comes after it has been given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest

from common.errors import InvalidRequest, NotFound, Unavailable
from common.rpc.gen.pdserve.v1 import registry_pb2
from common.worker_wire import profile_to_pb
from router.fleet import directives as directives_module
from router.fleet.directives import Directives
from router.fleet.registry import Registry
from router.fleet.registry_servicer import RegistryServicer
from router.fleet.workers import Departure
from tests.helpers.eventually import eventually
from tests.helpers.workers import profile

pytestmark = pytest.mark.unit
DRAIN = registry_pb2.RouterDirective(drain=registry_pb2.Drain(stay=True))

NOBODY: Any = None
"""For a context that is not looked at."""


class Stream:
    """A worker's end of a registration stream, which never ends by itself."""

    def __init__(self, worker_id: str) -> None:
        self.told: list[Any] = []
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._said.put_nowait(registry_pb2.WorkerStatus(profile=profile_to_pb(profile(worker_id))))

    async def read(self) -> Any:
        return await self._said.get()

    async def write(self, directive: Any) -> None:
        self.told.append(directive.WhichOneof("message"))


@pytest.fixture
async def register() -> AsyncIterator[Callable[[RegistryServicer, Stream], Any]]:
    """Opens a stream, until the end of the test."""
    tasks: list[asyncio.Task[None]] = []

    async def opened(servicer: RegistryServicer, stream: Stream) -> None:
        context: Any = stream
        tasks.append(asyncio.create_task(servicer.Register(None, context)))
        await eventually(lambda: stream.told == ["accepted"], within=2)

    yield opened
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_directive_goes_to_the_registration_that_holds_not_to_the_worker_s_former_one(register: Any) -> None:
    registry = Registry(fingerprint="f")
    servicer = RegistryServicer(registry, epoch=1, silence=timedelta(seconds=60))
    former, stream = Stream("p"), Stream("p")
    await register(servicer, former)
    await register(servicer, stream)

    await servicer.DrainWorker(registry_pb2.DrainWorkerRequest(worker_id="p"), NOBODY)
    await servicer.UndrainWorker(registry_pb2.UndrainWorkerRequest(worker_id="p"), NOBODY)

    assert (former.told, stream.told) == (["accepted"], ["accepted", "drain", "undrain"])


async def test_a_lost_worker_whose_stream_is_still_there_is_not_found(register: Any) -> None:
    registry = Registry(fingerprint="f")
    servicer = RegistryServicer(registry, epoch=1, silence=timedelta(seconds=60))
    stream = Stream("p")
    await register(servicer, stream)
    registry.leave(registry.live[0], "it was cut off", Departure.BROKEN)
    with pytest.raises(NotFound, match=r"must be that of a registered worker \(none\), got 'p'"):
        await servicer.DrainWorker(registry_pb2.DrainWorkerRequest(worker_id="p"), NOBODY)


async def test_a_directive_that_was_given_up_before_it_was_written_does_not_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directives_module, "TELL_TIMEOUT", timedelta(seconds=0.05))
    waiting, written = Directives(), list[Any]()

    async def write(directive: Any) -> None:
        written.append(directive.WhichOneof("message"))

    with pytest.raises(Unavailable, match=r"did not take the directive within 0\.05 s"):
        await waiting.tell(DRAIN)
    waiting.post(registry_pb2.RouterDirective(goodbye=registry_pb2.Goodbye()))
    await asyncio.wait_for(waiting.run(write), 2)
    assert written == ["goodbye"]


async def test_who_has_announced_itself_is_coming_until_its_call_ends() -> None:
    registry = Registry(fingerprint="f")
    servicer = RegistryServicer(registry, epoch=1, silence=timedelta(seconds=60))
    call = asyncio.create_task(servicer.Announce(registry_pb2.AnnounceRequest(role="decode"), NOBODY))
    await eventually(lambda: registry.arrivals.has("decode"), within=2)
    assert not registry.arrivals.has("prefill")
    assert registry.why_none("decode").endswith("; one is starting") and "starting" not in registry.why_none("prefill")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert registry.arrivals.coming == ()


async def test_an_announcement_names_a_role_that_there_is() -> None:
    servicer = RegistryServicer(Registry(fingerprint="f"), epoch=1, silence=timedelta(seconds=60))
    with pytest.raises(InvalidRequest, match="role must be 'prefill' or 'decode', got 'cook'"):
        await servicer.Announce(registry_pb2.AnnounceRequest(role="cook"), NOBODY)
