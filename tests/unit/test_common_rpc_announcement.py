"""Announcements against a real registry service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.address import Address
from common.errors import Unimplemented
from common.rpc.announcement import Announcement
from common.rpc.gen.pdserve.v1 import registry_pb2_grpc
from common.rpc.server import bind, make_server
from tests.helpers.eventually import eventually
from tests.helpers.rpc import LOOPBACK


class Router(registry_pb2_grpc.RegistryServiceServicer):
    """coming: who announces itself now. calls: how often somebody has."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.coming: list[str] = []
        self.calls = 0
        self._refuses = refuses
        self.server = make_server()

    async def __aenter__(self) -> Router:
        await self.listen(LOOPBACK)
        return self

    async def listen(self, address: Address) -> None:
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, self.server)
        self.address = await bind(self.server, address)
        await self.server.start()

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    async def Announce(self, request: Any, context: Any) -> None:
        self.calls += 1
        if self._refuses:
            raise Unimplemented("an older router")
        self.coming.append(request.role)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.coming.remove(request.role)


async def test_it_stands_at_every_router_until_its_block_ends() -> None:
    async with Router() as first, Router() as second:
        async with Announcement([first.address, second.address], "decode"):
            await eventually(lambda: first.coming == second.coming == ["decode"], within=5)
        await eventually(lambda: first.coming == second.coming == [], within=5)


async def test_it_ends_after_what_it_was_told_and_not_before() -> None:
    answered = asyncio.Event()

    async def is_answered() -> None:
        await answered.wait()

    async with Router() as router, Announcement([router.address], "prefill") as announcement:
        announcement.ends_after(is_answered())
        await eventually(lambda: router.coming == ["prefill"], within=5)
        answered.set()
        await eventually(lambda: router.coming == [], within=5)


async def test_a_router_that_comes_back_hears_it_again() -> None:
    async with Router() as router, Announcement([router.address], "prefill"):
        await eventually(lambda: router.coming == ["prefill"], within=5)
        await router.server.stop(0)
        router.server = make_server()
        await router.listen(router.address)
        await eventually(lambda: router.coming == ["prefill"] and router.calls == 2, within=10)


async def test_a_router_that_does_not_know_the_call_is_asked_once() -> None:
    async with Router(refuses=True) as old, Announcement([old.address], "decode") as announcement:
        await eventually(lambda: old.calls == 1, within=5)
        await eventually(lambda: all(task.done() for task in announcement._tasks), within=5)
    assert old.calls == 1


async def test_a_mistake_in_announcing_is_logged_and_costs_only_the_announcement(caplog: pytest.LogCaptureFixture) -> None:
    def broken(address: object, **_: object) -> Any:
        raise RuntimeError("a mistake")

    async with Announcement([LOOPBACK], "decode", connect=broken):
        await eventually(lambda: "a mistake" in caplog.text, within=5)
