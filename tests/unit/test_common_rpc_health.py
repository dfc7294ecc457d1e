"""Health and reflection over a real server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from common.address import Address
from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import generation_pb2_grpc
from common.rpc.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Health
from common.rpc.server import bind, make_server

NAME = "pdserve.v1.GenerationService"


class Served:
    def __init__(self, health: Health, channel: grpc.aio.Channel) -> None:
        self.health = health
        self._stub: Any = health_pb2_grpc.HealthStub(channel)
        self.channel = channel

    async def check(self, service: str) -> Any:
        return (await self._stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status

    def watch(self, service: str) -> Any:
        return self._stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=10)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = make_server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation_pb2_grpc.GenerationServiceServicer(), server)
    health = Health(server, [NAME])
    address = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    async with make_channel(address) as channel:
        yield Served(health, channel)
    await server.stop(0)


async def test_grp_10_a_process_is_alive_at_once_and_a_service_serves_when_set(served: Served) -> None:
    assert (await served.check(""), await served.check(NAME)) == (SERVING, NOT_SERVING)
    served.health.set(NAME, True)
    assert (await served.check(""), await served.check(NAME)) == (SERVING, SERVING)
    served.health.set(NAME, False)
    assert (await served.check(""), await served.check(NAME)) == (SERVING, NOT_SERVING)


async def test_grp_10_shutdown_is_not_serving_for_good(served: Served) -> None:
    served.health.set(NAME, True)
    served.health.shutdown()
    served.health.set(NAME, True)
    assert (await served.check(""), await served.check(NAME)) == (NOT_SERVING, NOT_SERVING)


async def test_grp_10_an_unknown_service_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.check("pdserve.v1.Other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'pdserve.v1.Other'" in (caught.value.details() or "")
    with pytest.raises(KeyError):
        served.health.set("pdserve.v1.Other", True)


async def test_grp_10_watch_delivers_each_change(served: Served) -> None:
    watch = served.watch(NAME)
    seen = [(await watch.read()).status]
    for serving in (True, False, True):
        served.health.set(NAME, serving)
        seen.append((await watch.read()).status)
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]


async def test_setting_what_is_already_set_tells_watchers_nothing(served: Served) -> None:
    watch = served.watch(NAME)
    await watch.read()
    served.health.set(NAME, False)
    await asyncio.sleep(0.05)
    served.health.set(NAME, True)
    assert (await watch.read()).status == SERVING


async def test_a_watcher_that_leaves_does_not_cut_off_the_others(served: Served) -> None:
    leaving, staying = served.watch(NAME), served.watch(NAME)
    await leaving.read()
    await staying.read()
    leaving.cancel()
    await asyncio.sleep(0.05)
    served.health.set(NAME, True)
    assert (await staying.read()).status == SERVING


async def test_watching_an_unknown_service_says_so_and_waits(served: Served) -> None:
    watch = served.watch("pdserve.v1.Other")
    assert (await watch.read()).status == SERVICE_UNKNOWN
    served.health.shutdown()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_watchers_of_names_that_nobody_knows_leave_nothing_behind(served: Served) -> None:
    """Anybody may ask, without a token, for names as long as a message."""
    gc.collect()
    before = sum(type(held) is asyncio.Event for held in gc.get_objects())
    for number in range(50):
        watch = served.watch(f"stranger-{number}")
        assert (await watch.read()).status == SERVICE_UNKNOWN
        watch.cancel()
        await asyncio.sleep(0)
    await served.check("")
    gc.collect()
    assert sum(type(held) is asyncio.Event for held in gc.get_objects()) - before < 10


async def test_lif_01_a_watcher_is_told_and_let_go_at_shutdown_so_that_it_does_not_hold_up_the_stop(served: Served) -> None:
    watch = served.watch("")
    assert (await watch.read()).status == SERVING
    served.health.shutdown()
    assert (await watch.read()).status == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_grp_11_reflection_lists_the_services_and_describes_them_by_both_of_its_names(served: Served, package: str) -> None:
    symbols = (NAME, f"{package}.ServerReflection", f"{package}.ServerReflectionResponse")
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols),
    ]
    reflect = served.channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    answers = [answer async for answer in reflect(iter(requests), timeout=5)]
    listed = {service.name for service in answers[0].list_services_response.service}
    both = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    assert listed == {NAME, "grpc.health.v1.Health"} | both
    files = [b"".join(answer.file_descriptor_response.file_descriptor_proto) for answer in answers[1:]]
    assert b"GenerateRequest" in files[0] and package.encode() in files[1] and files[1] == files[2]
