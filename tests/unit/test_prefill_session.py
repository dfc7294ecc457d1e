"""PrefillService over real gRPC: a hand-written router, a prefill worker over a fake runner, a fake decode worker."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import prefill_pb2
from common.wire import req_to_pb
from prefill_worker import session as session_module
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import waits
from tests.helpers.fake_runner import next_token
from tests.helpers.prefill_core import EPOCH, make_req
from tests.helpers.prefill_service import Request, serving

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode


async def test_a_submission_is_answered_with_its_start_its_first_token_and_the_hand_off() -> None:
    async with serving() as at:
        router = await at.open()
        await router.submit(IDS, uid=9, attempt=3)
        started, token, handed = [await router.read() for _ in range(3)]
        assert (started.started.uid, started.started.attempt, started.started.cached_tokens) == (9, 3, 0)
        first = token.first_token
        assert (first.uid, first.attempt, first.index, first.token_id) == (9, 3, 0, next_token(IDS))
        assert (handed.handed_off.uid, handed.handed_off.attempt) == (9, 3)


async def test_a_session_before_the_model_is_loaded_is_unavailable() -> None:
    async with serving(started=False) as at:
        router = at.router()
        await router.call.write(Request(hello=prefill_pb2.SessionHello(router_epoch=1)))
        assert await router.end() == (Status.UNAVAILABLE, "the model is still being loaded")


async def test_a_session_that_does_not_begin_with_hello_is_refused() -> None:
    async with serving() as at:
        router = at.router()
        await router.cancel(1)
        code, text = await router.end()
        assert code is Status.INVALID_ARGUMENT and "hello" in text


async def test_a_session_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_SECONDS", 0.1)
    async with serving() as at:
        assert await at.router().end() == (Status.DEADLINE_EXCEEDED, "no hello within 0.1 s")


async def test_a_kind_of_message_that_only_newer_routers_know_is_left_out() -> None:
    async with serving() as at:
        router = await at.open()
        await router.call.write(Request.FromString(b"\x9a\x06\x00"))  # Field 99, an empty message.
        await router.submit(IDS)
        assert await router.kinds(3) == ["started", "first_token", "handed_off"]


async def test_a_second_hello_ends_the_session() -> None:
    async with serving() as at:
        router = await at.open()
        await router.call.write(Request(hello=prefill_pb2.SessionHello(router_epoch=EPOCH)))
        code, text = await router.end()
        assert code is Status.INVALID_ARGUMENT and "hello" in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"decode": None}, "decode_address and decode_worker must be given"),
        ({"output_len": 0}, "output_len must be at least 1"),
    ],
)
async def test_a_submission_that_breaks_a_rule_is_a_failure_and_the_session_goes_on_FLT_07(fields: Any, text: str) -> None:
    async with serving() as at:
        router = await at.open()
        await router.submit(IDS, n=2, **fields)
        for uid in (1, 2):
            failure = (await router.read()).failure
            assert (failure.uid, failure.code, failure.retryable) == (uid, Status.INVALID_ARGUMENT.value[0], False)
            assert text in failure.message
        await router.submit(IDS, uid=5)
        assert await router.kinds(3) == ["started", "first_token", "handed_off"]


async def test_a_key_of_another_router_is_refused() -> None:
    async with serving() as at:
        router = await at.open(epoch=EPOCH + 1)
        await router.submit(IDS)
        assert "router_epoch" in (await router.read()).failure.message


async def test_a_single_token_submission_needs_no_decode_worker_HND_02() -> None:
    async with serving() as at:
        router = await at.open()
        await router.submit(IDS, output_len=1, decode=None)
        assert await router.kinds(2) == ["started", "first_token"]


async def test_when_a_session_breaks_all_its_work_is_dropped_and_no_others_FLT_11() -> None:
    async with serving(max_running=8) as at:
        go = asyncio.Event()
        at.decode.before["Reserve"] = waits(go)
        dying, living = await at.open(epoch=EPOCH), await at.open(epoch=EPOCH + 1)
        for uid in range(1, 4):
            await dying.submit(IDS, uid=uid)
        submit = prefill_pb2.Submit(req=req_to_pb(make_req(IDS)), decode_address=at.decode.address)
        submit.decode_worker = at.decode.worker_id
        submit.req.key.router_epoch = EPOCH + 1
        await living.call.write(Request(submit=submit))
        await eventually(lambda: at.decode.calls.count("Reserve") == 4, within=2)
        dying.call.cancel()
        await eventually(lambda: len(at.stand.worker.journeys) == 1, within=2)
        go.set()
        assert await living.kinds(3) == ["started", "first_token", "handed_off"]


async def test_a_second_session_of_a_router_takes_the_place_of_the_first() -> None:
    async with serving() as at:
        go = asyncio.Event()
        first = await at.open_with_reserve_held(go, IDS)
        at.decode.before.clear()
        second = at.router()
        await second.call.write(Request(hello=prefill_pb2.SessionHello(router_epoch=EPOCH)))
        await second.submit(IDS, uid=2)  # What the former session drops must not be the successor's.
        assert await second.kinds(4) == ["opened", "started", "first_token", "handed_off"]
        assert (await first.end())[0] is Status.ABORTED
        go.set()


async def test_a_cancel_that_comes_before_its_submission_leaves_a_tombstone() -> None:
    async with serving() as at:
        router = await at.open()
        await router.cancel(1)
        await router.submit(IDS, uid=1)
        await router.submit(IDS, uid=2)
        assert {(await router.read()).WhichOneof("message") for _ in range(3)} == {"started", "first_token", "handed_off"}
        assert [ticket.request.req.key.uid for ticket in at.decode.tickets.values()] == [2]


async def test_a_cancelled_attempt_says_nothing_more_and_the_next_attempt_works_CAN_07() -> None:
    async with serving() as at:
        go = asyncio.Event()
        router = await at.open_with_reserve_held(go, IDS, uid=1, attempt=1)
        await router.cancel(1, attempt=1)
        go.set()
        await router.submit(IDS, uid=1, attempt=2)
        messages = [await router.read() for _ in range(3)]
        assert [m.started.attempt or m.first_token.attempt or m.handed_off.attempt for m in messages] == [2, 2, 2]


async def test_the_deadline_that_the_router_sends_ends_the_request_CAN_08() -> None:
    async with serving() as at:
        never = asyncio.Event()
        at.decode.before["Reserve"] = waits(never)
        router = await at.open()
        await router.submit(IDS, deadline_ms=200)
        failure = (await router.read()).failure
        assert (failure.code, failure.retryable) == (Status.DEADLINE_EXCEEDED.value[0], False)
        never.set()


async def test_a_request_without_a_deadline_is_bounded_too() -> None:
    async with serving(longest=0.2) as at:
        never = asyncio.Event()
        at.decode.before["Reserve"] = waits(never)
        router = await at.open()
        await router.submit(IDS)
        assert (await router.read()).failure.code == Status.DEADLINE_EXCEEDED.value[0]
        never.set()


async def test_a_router_that_does_not_read_loses_its_session_and_nobody_else_does_CAP_05(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(session_module, "OUTBOX_MESSAGES", 50)
    async with serving(max_requests=100_000) as at:
        deaf, living = await at.open(epoch=EPOCH), await at.open(epoch=EPOCH + 1)
        bad = Request(submit=prefill_pb2.Submit(req=req_to_pb(make_req(IDS, uid=1, n=16))))
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            for _ in range(20_000):
                await deaf.call.write(bad)
        # A client whose write fails reports an error of its own, so the worker's log is asked.
        assert "RESOURCE_EXHAUSTED: the router does not read: 50 messages wait for it" in caplog.text
        await living.cancel(1)
        await living.submit(IDS, uid=2)
        assert "router_epoch" in (await living.read()).failure.message


async def test_flushing_drops_the_prefix_cache_over_the_wire() -> None:
    async with serving() as at:
        router = await at.open()
        await router.submit(IDS, output_len=1)
        await router.kinds(2)
        await eventually(lambda: len(at.stand.worker.journeys) == 0, within=2)
        response = await at.stub.FlushPrefixCache(prefill_pb2.FlushPrefixCacheRequest(), timeout=2)
        assert response.pages_freed == 2
        await router.submit(IDS, uid=2, output_len=1)
        assert (await router.read()).started.cached_tokens == 0


async def test_many_sessions_messages_all_go_through_one_writer_in_order() -> None:
    async with serving(max_running=16, num_pages=200) as at:
        router = await at.open()
        for uid in range(40):
            await router.submit([uid], uid=uid)
        seen: dict[int, list[str]] = {}
        for _ in range(120):
            message = await router.read()
            kind = str(message.WhichOneof("message"))
            seen.setdefault(getattr(message, kind).uid, []).append(kind)
        assert seen == {uid: ["started", "first_token", "handed_off"] for uid in range(40)}
