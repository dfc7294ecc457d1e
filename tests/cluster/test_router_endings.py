"""How a call ends before its time: cancel, deadline, abort, names in use, shutdown."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import Answer, first_event
from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]
LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
async def stand(tiny: Path) -> AsyncIterator[RouterStand]:
    async with RouterStand(tiny) as running:
        yield running


async def test_a_cancel_before_the_first_token_reaches_both_workers_can_01(stand: RouterStand) -> None:
    stand.prefill[0].gate.clear()
    call = stand.client.call(PROMPT, sampling=LONG)
    await eventually(lambda: stand.prefill[0].submits, within=3)

    call.cancel()

    key = (stand.prefill[0].submits[0].req.key.uid, 1)
    await eventually(lambda: key in stand.prefill[0].cancels and key in stand.decode[0].cancels, within=1)
    assert stand.prefill[0].is_idle()


async def test_a_cancel_in_mid_stream_reaches_the_decode_worker(stand: RouterStand) -> None:
    call = stand.client.call(PROMPT, sampling=LONG, n=2)
    await first_event(call, "delta")

    call.cancel()

    await eventually(lambda: len(stand.decode[0].cancels) == 2 and stand.decode[0].is_idle(), within=1)


async def test_a_deadline_in_any_state_frees_the_workers_can_08(stand: RouterStand) -> None:
    stand.prefill[0].gate.clear()
    code, _ = await stand.client.refusal(PROMPT, sampling=LONG, timeout=0.2)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await stand.assert_idle(within=1)

    stand.prefill[0].gate.set()
    call = stand.client.call(PROMPT, sampling=LONG, timeout=0.4)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await stand.assert_idle(within=1)


async def test_thousands_of_tiny_deadlines_leave_nothing_can_10(stand: RouterStand, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)

    async def one() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stand.client.generate(PROMPT, sampling=LONG, timeout=rng.uniform(0.0005, 0.005))
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    for _ in range(40):
        await asyncio.gather(*(one() for _ in range(50)))

    await stand.assert_idle()
    assert not [record for record in caplog.records if record.exc_info], "tracebacks in the log"
    assert (await stand.client.generate(PROMPT, sampling={"max_tokens": 5})).ids == expected_output(PROMPT, 5)


async def test_an_id_is_free_again_right_after_a_cancel_can_07(stand: RouterStand) -> None:
    for _ in range(200):
        call = stand.client.call(PROMPT, sampling=LONG, request_id="X")
        await first_event(call, "delta")
        call.cancel()
        answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 8, "ignore_eos": True}, request_id="X")
        assert answer.ids == expected_output(PROMPT, 8)


async def test_a_live_id_is_refused_and_its_owner_untouched_val_07(stand: RouterStand) -> None:
    call = stand.client.call(PROMPT, sampling={"max_tokens": 300, "ignore_eos": True}, request_id="X")
    answer = Answer()
    stream = aiter(call)
    answer.add(await anext(stream))

    code, message = await stand.client.refusal(PROMPT, request_id="X")

    assert code is grpc.StatusCode.ALREADY_EXISTS and "'X'" in message
    async for event in stream:
        answer.add(event)
    assert answer.ids == expected_output(PROMPT, 300)
    assert len((await stand.client.generate(PROMPT, sampling={"max_tokens": 2}, request_id="X")).ids) == 2


async def test_abort_finishes_every_completion_and_frees_the_workers(stand: RouterStand) -> None:
    stream = aiter(stand.client.call(PROMPT, sampling=LONG, n=3, request_id="X"))
    answer = Answer()
    while len(answer.completions) < 3:
        answer.add(await anext(stream))

    assert (await stand.client.stub.Abort(pb.AbortRequest(request_id="X"))).found
    async for event in stream:
        answer.add(event)

    for number, completion in answer.completions.items():
        assert completion.reason == "ABORT"
        assert completion.ids == expected_output(PROMPT, len(completion.ids), number)
        assert completion.end.usage.completion_tokens == len(completion.ids)
    await stand.assert_idle(within=1)
    assert not (await stand.client.stub.Abort(pb.AbortRequest(request_id="X"))).found


async def test_abort_before_the_first_token_ends_the_call_ok(stand: RouterStand) -> None:
    stand.prefill[0].gate.clear()
    call = stand.client.call(PROMPT, sampling=LONG, n=2, request_id="X")
    await eventually(lambda: stand.prefill[0].submits, within=3)

    assert (await stand.client.stub.Abort(pb.AbortRequest(request_id="X"))).found

    events = [event async for event in call]
    assert [(event.index, event.finished.reason) for event in events] == [
        (0, pb.FINISH_REASON_ABORT),
        (1, pb.FINISH_REASON_ABORT),
    ]
    await stand.assert_idle(within=1)


async def test_abort_while_there_is_no_worker_ends_the_call_ok_at_once(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=0, decode=0, pair_wait=timedelta(seconds=60)) as stand:
        call = stand.client.call(PROMPT, n=2, request_id="X")
        await eventually(lambda: stand.router.admission.find("X") is not None, within=3)
        assert (await stand.client.stub.Abort(pb.AbortRequest(request_id="X"))).found
        ends = [(event.index, event.finished.reason) async for event in call]
        assert ends == [(0, pb.FINISH_REASON_ABORT), (1, pb.FINISH_REASON_ABORT)]


async def test_the_grace_also_ends_calls_that_wait_for_a_worker_lif_03(tiny: Path) -> None:
    async with RouterStand(
        tiny, prefill=0, decode=0, pair_wait=timedelta(seconds=60), grace=timedelta(milliseconds=200)
    ) as stand:
        call = asyncio.ensure_future(stand.client.refusal(PROMPT))
        await eventually(lambda: stand.router.admission.in_flight, within=3)
        await asyncio.wait_for(stand.router.stop(), 10)
        code, message = await call
        assert code is grpc.StatusCode.UNAVAILABLE and "grace" in message


async def test_a_reader_that_stops_holds_up_nobody_and_gets_everything_cap_05(stand: RouterStand) -> None:
    slow = [stand.client.call(PROMPT, sampling=LONG | {"max_tokens": 2000}, logprobs=2) for _ in range(3)]
    streams = [aiter(call) for call in slow]
    for stream in streams:
        await anext(stream)
    began = time.monotonic()
    for _ in range(5):
        answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 50, "ignore_eos": True})
        assert answer.ids == expected_output(PROMPT, 50)
    assert time.monotonic() - began < 5

    await eventually(lambda: stand.decode[0].is_idle(), within=30)
    for stream in streams:
        ids = [token async for event in stream for token in event.delta.token_ids]
        assert ids == expected_output(PROMPT, 2000)


async def test_running_calls_finish_in_the_grace_and_new_ones_are_refused_lif_01(tiny: Path) -> None:
    async with RouterStand(tiny) as stand:
        stand.decode[0].steps.seconds = 0.005
        running = asyncio.create_task(stand.client.generate(PROMPT, sampling={"max_tokens": 100, "ignore_eos": True}))
        await eventually(lambda: stand.decode[0].running, within=3)

        stopping = asyncio.create_task(stand.router.stop())
        await asyncio.sleep(0.05)
        code, message = await stand.client.refusal(PROMPT)

        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in message
        assert (await running).ids == expected_output(PROMPT, 100)
        await asyncio.wait_for(stopping, 2)


async def test_calls_that_outlast_the_grace_end_unavailable_lif_03_grp_02(tiny: Path) -> None:
    async with RouterStand(tiny, grace=timedelta(milliseconds=200)) as stand:
        call = stand.client.call(PROMPT, sampling=LONG)
        stand.decode[0].steps.seconds = 0.02
        await first_event(call, "delta")

        await asyncio.wait_for(stand.router.stop(), 5)

        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in call:
                pass
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "grace" in (error.value.details() or "")
