"""What the client does not notice: attempts that fail, workers that hand back, die or stutter; and what it does get told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from common.wire import ids_from_bytes
from tests.helpers.client import first_event
from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]
FORTY = {"max_tokens": 40, "ignore_eos": True}
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


@pytest.fixture
async def stand(tiny: Path) -> AsyncIterator[RouterStand]:
    async with RouterStand(tiny) as running:
        yield running


async def test_a_retraction_continues_seamlessly_and_counts_no_failure(stand: RouterStand) -> None:
    stand.decode[0].retract_at = {3, 7, 8, 20, 33}

    answer = await stand.client.generate(PROMPT, sampling=FORTY)

    assert answer.ids == expected_output(PROMPT, 40)
    assert answer.only.end.timing.attempts == 6
    assert answer.usage.prompt_tokens == 5
    assert stand.metric("pdserve_retractions_total") == 5
    assert stand.metric("pdserve_attempts_total", cause="retraction") == 5
    assert stand.metric("pdserve_attempts_total", cause="failure") == 0
    again = stand.prefill[0].submits[1].req
    assert again.key.uid == stand.prefill[0].submits[0].req.key.uid, "it keeps its place by arrival"
    assert (again.key.attempt, again.prompt_len, again.output_len) == (2, 5, 37)
    assert list(ids_from_bytes(again.input_ids)) == PROMPT + expected_output(PROMPT, 3)
    assert again.sampling.seed == stand.prefill[0].submits[0].req.sampling.seed


async def test_one_retracted_completion_of_a_group_continues_alone(stand: RouterStand) -> None:
    stand.decode[0].retract_at = {9}

    answer = await stand.client.generate(PROMPT, sampling=FORTY, n=3)

    for number, completion in answer.completions.items():
        assert completion.ids == expected_output(PROMPT, 40, number)
    assert sorted(completion.end.timing.attempts for completion in answer.completions.values()) == [1, 1, 2]


async def test_doubled_tokens_are_dropped_hnd_15(stand: RouterStand) -> None:
    stand.decode[0].steps.duplicate = True
    assert (await stand.client.generate(PROMPT, sampling=FORTY)).ids == expected_output(PROMPT, 40)


async def test_tokens_out_of_order_wait_for_the_gap_to_close_hnd_15(stand: RouterStand) -> None:
    stand.decode[0].steps.reverse = True
    assert (await stand.client.generate(PROMPT, sampling=FORTY, n=2)).completions[1].ids == expected_output(PROMPT, 40, 1)


async def test_a_session_broken_in_mid_stream_continues_on_another_worker_flt_04(tiny: Path) -> None:
    async with RouterStand(tiny, decode=2) as stand:
        stand.decode[0].die_at = {12}

        answers = await asyncio.gather(*(stand.client.generate(PROMPT, sampling=FORTY) for _ in range(4)))

        for answer in answers:
            assert answer.ids == expected_output(PROMPT, 40)
        assert {answer.only.end.timing.attempts for answer in answers} == {1, 2}
        retried = [submit for submit in stand.prefill[0].submits if submit.req.key.attempt == 2]
        assert {submit.decode_worker for submit in retried} == {"decode-1"}


async def test_a_prefill_session_broken_before_the_hand_off_starts_anew(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=2) as stand:
        stand.prefill[0].hold_commit.clear()
        call = stand.client.call(PROMPT, sampling=FORTY)
        await first_event(call, "delta")

        stand.prefill[0].break_sessions()

        ids = [token async for event in call for token in event.delta.token_ids]
        assert expected_output(PROMPT, 1) + ids == expected_output(PROMPT, 40)
        assert stand.prefill[1].submits[0].req.output_len == 39, "token 0 stays as streamed"
        key = (stand.prefill[0].submits[0].req.key.uid, 1)
        assert key in stand.decode[0].cancels, "one leg's failure cancels the other"


async def test_a_retryable_failure_is_retried_and_the_last_one_told(stand: RouterStand) -> None:
    stand.prefill[0].fail_next = [(UNAVAILABLE, "no answer from decode-0", True)] * 2
    assert (await stand.client.generate(PROMPT, sampling=FORTY)).ids == expected_output(PROMPT, 40)

    stand.prefill[0].fail_next = [(UNAVAILABLE, "no answer from decode-0", True)] * 5
    code, message = await stand.client.refusal(PROMPT, sampling=FORTY)

    assert code is grpc.StatusCode.UNAVAILABLE and "5 attempts" in message and "no answer from decode-0" in message
    assert stand.metric("pdserve_attempt_failures_total", code="UNAVAILABLE") == 7
    assert stand.metric("pdserve_attempts_total", cause="first") == 2
    assert stand.metric("pdserve_attempts_total", cause="failure") == 6


async def test_a_refusal_reaches_the_client_with_its_status_hnd_11(stand: RouterStand) -> None:
    stand.prefill[0].fail_next = [(grpc.StatusCode.OUT_OF_RANGE.value[0], "prompt must fit in 8 pages, got 9", False)]

    code, message = await stand.client.refusal(PROMPT, sampling=FORTY, n=2)

    assert (code, message) == (grpc.StatusCode.OUT_OF_RANGE, "prompt must fit in 8 pages, got 9")
    assert len(stand.prefill[0].submits) == 1


async def test_when_all_workers_die_calls_end_unavailable_quickly_and_serve_again_later_flt_09(tiny: Path) -> None:
    async with RouterStand(tiny) as stand:
        stand.decode[0].steps.seconds = 0.01
        calls = [stand.client.call(PROMPT, sampling={"max_tokens": 2000, "ignore_eos": True}) for _ in range(4)]
        for call in calls:
            await first_event(call, "delta")
        began = time.monotonic()
        for worker in stand.workers:
            await worker.close()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in call:
                    pass
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        code, message = await stand.client.refusal(PROMPT)
        assert time.monotonic() - began < 3
        assert code is grpc.StatusCode.UNAVAILABLE and "worker is registered" in message and "was lost" in message

        stand.prefill.clear()
        stand.decode.clear()
        await stand.add_prefill(worker_id="prefill-new")
        await stand.add_decode(worker_id="decode-new")
        await stand.ready()
        assert (await stand.client.generate(PROMPT, sampling=FORTY)).ids == expected_output(PROMPT, 40)


async def test_a_worker_restarted_at_its_address_serves_at_once_flt_01(stand: RouterStand) -> None:
    old = stand.prefill[0]
    assert len((await stand.client.generate(PROMPT, sampling=FORTY)).ids) == 40
    address = old.address
    await old.close()
    stand.prefill.clear()
    new = await stand.add_prefill(start=False, worker_id="prefill-new")
    await new.start(listen=address)
    await stand.ready()

    answers = await asyncio.gather(*(stand.client.generate(PROMPT, sampling=FORTY, timeout=10) for _ in range(20)))

    assert all(answer.ids == expected_output(PROMPT, 40) for answer in answers)
    assert len(new.submits) == 20


async def test_no_request_goes_to_a_draining_worker_flt_06(tiny: Path) -> None:
    async with RouterStand(tiny, decode=2) as stand:
        leaving = stand.decode[0]
        leaving.load = replace(leaving.load, draining=True)
        leaving.standing.changed()
        placeable = {"prefill-0", "decode-1"}
        await eventually(lambda: {w.id for w in stand.router.registry.live if w.is_placeable} == placeable, within=2)

        for _ in range(5):
            answer = await stand.client.generate(PROMPT, sampling=FORTY)
            assert answer.started is not None and answer.started.decode_worker == "decode-1"
        states = {worker.id: worker.state for worker in (await stand.client.workers()).values()}
        assert states == {"prefill-0": "ready", "decode-0": "draining", "decode-1": "ready"}


async def test_lif_01_what_a_worker_said_before_it_left_counts_also_if_its_leave_is_seen_first(stand: RouterStand) -> None:
    stand.prefill[0].hold_commit.clear()
    call = stand.client.call(PROMPT, sampling=FORTY)
    first = await first_event(call, "delta")
    for worker in stand.workers:
        await worker.unregister()
    await eventually(lambda: not stand.router.registry.live, within=3)

    stand.prefill[0].hold_commit.set()
    rest = [token async for event in call for token in event.delta.token_ids]

    assert [*first.delta.token_ids, *rest] == expected_output(PROMPT, 40)
    assert stand.metric("pdserve_attempt_failures_total") == 0
    for worker in stand.workers:
        worker.break_sessions()
    gone = stand.router.registry.recently_lost
    await eventually(lambda: len(gone) == 2 and not any(map(stand.router.fleet.session, gone)), within=3)
    assert [worker.sessions_opened for worker in stand.workers] == [1, 1]


async def test_a_worker_that_left_and_does_not_end_its_session_is_given_up(
    stand: RouterStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.fleet.LAST_WORDS", timedelta(milliseconds=200))
    stand.decode[0].steps.gate.clear()
    call = stand.client.call(PROMPT, sampling=FORTY)
    first = await first_event(call, "delta")
    await stand.decode[0].unregister()
    await stand.add_decode()

    rest = [token async for event in call for token in event.delta.token_ids]

    assert [*first.delta.token_ids, *rest] == expected_output(PROMPT, 40)
    assert stand.metric("pdserve_attempt_failures_total") == 1
    stand.decode[0].steps.gate.set()
