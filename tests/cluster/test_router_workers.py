"""Workers joining and leaving: who is let in, who is listed, and what health says of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import PdserveError
from common.rpc.channels import error_of
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from common.work import Role, WorkerProfile
from common.worker_wire import profile_to_pb
from tests.helpers.client import first_event
from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import RouterStand, compatibility

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]
SERVICE = "pdserve.v1.GenerationService"
NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


async def health(stand: RouterStand, service: str = SERVICE) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(stand.client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def profile(
    stand: RouterStand, *, role: Role = "prefill", worker_id: str = "w", address: str = "127.0.0.1:1", **differs: Any
) -> WorkerProfile:
    return WorkerProfile(worker_id, role, address, compatibility(stand.model, **differs), "cpu", 10, 1, "0")


class Joining:
    """A Register stream driven by hand."""

    def __init__(self, stand: RouterStand, profile: WorkerProfile) -> None:
        stub: Any = registry_pb2_grpc.RegistryServiceStub(stand.client.channel)
        self.call = stub.Register()
        self._directives = aiter(self.call)
        self._profile = profile

    async def join(self) -> registry_pb2.RouterDirective:
        """Raises the refusal as an error of ours."""
        await self.call.write(registry_pb2.WorkerStatus(profile=profile_to_pb(self._profile)))
        return await self.read()

    async def read(self) -> registry_pb2.RouterDirective:
        try:
            directive: registry_pb2.RouterDirective = await anext(self._directives)
            return directive
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None


async def test_it_starts_without_workers_and_serves_once_a_pair_is_there_lif_08(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=0, decode=0) as stand:
        assert (await health(stand), await health(stand, "")) == (NOT_SERVING, SERVING)
        began = time.monotonic()
        code, message = await stand.client.refusal(PROMPT)
        assert code is grpc.StatusCode.UNAVAILABLE and "no prefill worker is registered" in message
        assert time.monotonic() - began < 4

        await stand.add_decode()
        await stand.ready()
        assert await health(stand) == NOT_SERVING
        await stand.add_prefill()
        await stand.ready()

        assert await health(stand) == SERVING
        assert (await stand.client.generate(PROMPT, sampling={"max_tokens": 5})).ids == expected_output(PROMPT, 5)


async def test_a_request_waits_a_little_for_workers_that_are_just_coming(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=0, pair_wait=timedelta(seconds=5)) as stand:
        request = asyncio.create_task(stand.client.generate(PROMPT, sampling={"max_tokens": 5}))
        await asyncio.sleep(0.1)
        await stand.add_prefill()
        assert (await request).ids == expected_output(PROMPT, 5)


@pytest.mark.parametrize(
    ("field", "theirs"),
    [("page_size", 32), ("num_layers", 3), ("num_kv_heads", 1), ("max_context", 64), ("dtype", "bfloat16"), ("head_dim", 8)],
)
async def test_an_incompatible_worker_is_refused_naming_both_values_cmp_01(tiny: Path, field: str, theirs: Any) -> None:
    async with RouterStand(tiny, decode=0) as stand:
        await stand.ready()
        decode = await stand.add_decode(differs={field: theirs})
        ours = getattr(compatibility(tiny), field)

        await eventually(lambda: "differs" in stand.router.registry.why_none("decode"), within=3)
        assert decode.sessions_opened == 0 and await health(stand) == NOT_SERVING
        code, message = await stand.client.refusal(PROMPT)

        assert code is grpc.StatusCode.UNAVAILABLE
        for named in (field, repr(ours), repr(theirs), "prefill-0", "decode-0"):
            assert named in message
        assert await stand.client.workers() and "decode-0" not in await stand.client.workers()


@pytest.mark.parametrize(
    ("field", "theirs"), [("fingerprint", "0123456789abcdef"), ("protocol_version", 99), ("pool_layout", "x")]
)
async def test_the_router_itself_must_agree_cmp_03(tiny: Path, field: str, theirs: Any) -> None:
    async with RouterStand(tiny, prefill=0, decode=0) as stand:
        with pytest.raises(PdserveError) as error:
            await Joining(stand, profile(stand, **{field: theirs})).join()
        assert error.value.status is grpc.StatusCode.FAILED_PRECONDITION
        assert repr(theirs) in str(error.value) and "the router" in str(error.value)


async def test_a_product_version_is_no_obstacle(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=0, decode=0) as stand:
        assert (await Joining(stand, profile(stand)).join()).HasField("accepted")


@pytest.mark.parametrize(("fields", "named"), [({"address": "::1:50051"}, "address"), ({"worker_id": ""}, "worker_id")])
async def test_a_malformed_profile_is_refused(tiny: Path, fields: dict[str, Any], named: str) -> None:
    async with RouterStand(tiny, prefill=0, decode=0) as stand:
        with pytest.raises(PdserveError, match=named) as error:
            await Joining(stand, profile(stand, **fields)).join()
        assert error.value.status is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_lost_worker_is_listed_as_lost_and_gets_nothing(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=2) as stand:
        await stand.prefill[0].close()
        gone = stand.prefill.pop(0)

        async def states() -> dict[str, str]:
            response = await stand.client.stub.GetCluster(pb.GetClusterRequest())
            return {worker.id: worker.state for worker in response.workers}

        expected = {"prefill-0": "lost", "prefill-1": "ready", "decode-0": "ready"}
        await eventually(lambda: _equal(states(), expected), within=2)
        for _ in range(3):
            await stand.client.generate(PROMPT, sampling={"max_tokens": 5})
        assert gone.submits == []


async def test_a_silent_worker_is_lost_and_comes_back_when_it_speaks(tiny: Path) -> None:
    async with RouterStand(tiny, worker_silence=timedelta(seconds=2)) as stand:
        joining = Joining(stand, profile(stand, worker_id="silent"))
        await joining.join()
        assert "silent" in await stand.client.workers()

        with pytest.raises(PdserveError, match="no report for 2 s") as error:
            await joining.read()

        assert error.value.status is grpc.StatusCode.UNAVAILABLE
        assert set(await stand.client.workers()) == {"prefill-0", "decode-0"}
        await Joining(stand, profile(stand, worker_id="silent")).join()


async def test_a_successor_at_an_address_replaces_its_former_self(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=0, decode=0) as stand:
        first = Joining(stand, profile(stand, worker_id="first"))
        await first.join()
        second = Joining(stand, profile(stand, worker_id="second", page_size=64))
        await second.join()

        assert set(await stand.client.workers()) == {"second"}
        with pytest.raises(PdserveError, match="second.*taken over"):
            await Joining(stand, profile(stand, worker_id="first", page_size=64)).join()


async def test_a_dead_address_in_the_list_holds_up_nobody_flt_13(tiny: Path) -> None:
    async with RouterStand(tiny) as stand:
        dead = [
            Joining(stand, profile(stand, worker_id="aaa", address="127.0.0.1:1")),
            Joining(stand, profile(stand, worker_id="bbb", address="127.0.0.1:2", role="decode")),
        ]
        for joining in dead:
            await joining.join()

        answers = [await stand.client.generate(PROMPT, sampling={"max_tokens": 5}) for _ in range(3)]

        assert all(answer.ids == expected_output(PROMPT, 5) for answer in answers)
        assert await health(stand) == SERVING


async def test_health_watchers_hear_of_each_change_grp_10(tiny: Path) -> None:
    async with RouterStand(tiny, decode=0) as stand:
        stub: Any = health_pb2_grpc.HealthStub(stand.client.channel)
        watch = aiter(stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
        assert (await anext(watch)).status == NOT_SERVING
        decode = await stand.add_decode()
        assert (await anext(watch)).status == SERVING
        await decode.close()
        stand.decode.clear()
        assert (await anext(watch)).status == NOT_SERVING


async def test_a_new_router_session_does_not_follow_an_impostor(tiny: Path) -> None:
    """An answer from another worker than the registered one is no session (its address was reused)."""
    async with RouterStand(tiny) as stand:
        address = stand.prefill[0].address.replace("127.0.0.1", "localhost")
        joining = Joining(stand, profile(stand, role="decode", worker_id="zzz", address=address))
        await joining.join()
        worker = next(worker for worker in stand.router.registry.live if worker.id == "zzz")
        await eventually(lambda: worker.trouble, within=3)
        assert worker.is_elsewhere and not worker.has_session


async def test_a_session_that_breaks_is_opened_again_while_the_worker_stays_registered(tiny: Path) -> None:
    async with RouterStand(tiny) as stand:
        stand.prefill[0].break_sessions()
        await eventually(lambda: stand.prefill[0].sessions_opened == 2, within=3)
        call = stand.client.call(PROMPT, sampling={"max_tokens": 5})
        await first_event(call, "finished")


async def test_a_registration_that_breaks_and_comes_again_keeps_the_session_and_what_runs_there(tiny: Path) -> None:
    async with RouterStand(tiny) as stand:
        await stand.client.generate(PROMPT, sampling={"max_tokens": 3})
        for worker in stand.workers:
            (known,) = [each for each in stand.router.registry.live if each.id == worker.worker_id]
            for _ in range(2):
                await worker.unregister()
                await eventually(lambda: known.lost_at is not None, within=3)  # noqa: B023
                worker.register()
                await eventually(lambda: known.is_placeable, within=3)  # noqa: B023
            assert worker.sessions_opened == 1
        assert len((await stand.client.generate(PROMPT, sampling={"max_tokens": 3})).ids) == 3


async def test_a_router_that_stops_complains_of_nothing(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with RouterStand(tiny) as stand:
        await stand.client.generate(PROMPT, sampling={"max_tokens": 3})
    gc.collect()  # Of errors in tasks asyncio complains when they are collected.
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_session_ends_a_while_after_a_registration_that_does_not_come_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.fleet.LAST_WORDS", timedelta(seconds=0.3))
    async with RouterStand(tiny) as stand:
        worker = stand.decode[0]
        await worker.unregister()
        await eventually(lambda: not worker._sessions, within=3)
        worker.register()
        await eventually(lambda: worker.sessions_opened == 2, within=3)
        assert len((await stand.client.generate(PROMPT, sampling={"max_tokens": 3})).ids) == 3


async def _equal(states: Any, expected: dict[str, str]) -> bool:
    found = await states
    assert found == expected, found
    return True


async def test_a_worker_whose_place_another_took_for_a_moment_registers_again(tiny: Path) -> None:
    """Found by tests/faults/test_fuzz.py: its stream stood, so it went on reporting, to nobody."""
    async with RouterStand(tiny) as stand:
        impostor = Joining(stand, profile(stand, worker_id="decode-0", role="decode", address="127.0.0.1:1"))
        await impostor.join()
        assert (await stand.client.workers())["decode-0"].address == "127.0.0.1:1"
        impostor.call.cancel()

        await stand.ready(within=5)
        assert len((await stand.client.generate(PROMPT, sampling={"max_tokens": 3})).ids) == 3


async def test_registrations_and_sessions_that_end_leave_no_connection_behind(tiny: Path) -> None:
    """Found by tests/faults/test_fuzz.py: rings of frames and errors kept them until a garbage collection."""

    def connections() -> int:
        return sum(found.status == psutil.CONN_ESTABLISHED for found in psutil.Process().net_connections())

    async with RouterStand(tiny) as stand:
        usurper: Any = registry_pb2_grpc.RegistryServiceStub(stand.client.channel)
        status = registry_pb2.WorkerStatus(profile=profile_to_pb(profile(stand, worker_id="decode-0", role="decode")))
        assert await stand.client.workers()
        gc.collect()
        gc.disable()
        try:
            before = connections()
            for _ in range(5):
                call = usurper.Register()
                await call.write(status)
                assert (await call.read()).HasField("accepted")
                call.cancel()
                await stand.ready(within=5)
            await eventually(lambda: connections() <= before, within=3)
        finally:
            gc.enable()
