"""One request's way on a prefill worker, against a decode worker that does what the test wants, over real gRPC."""

from __future__ import annotations

import asyncio
import time
import zlib

import grpc
import pytest

from common.errors import Unavailable
from common.handoff.base import page_range
from common.work import FinishReason
from prefill_worker.states import State
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import aborts, waits
from tests.helpers.fake_runner import EOS, next_token
from tests.helpers.prefill_stand import Recorder, Stands

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode


@pytest.mark.parametrize("transport", ["grpc", "shm", "auto"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 33])
async def test_every_byte_and_the_first_token_arrive_BND_05(stands: Stands, transport: str, length: int) -> None:
    stand = await stands(transport=transport)
    ids = [(7 * i) % 200 for i in range(length)]
    for uid in (1, 2):  # Cold, then with a prefix hit.
        report = Recorder()
        journey = stand.submit(ids, uid=uid, report=report)
        await stand.finish(journey)
        assert report.kinds == ["started", "first_token", "handed_off"]
        (token,) = report.all("first_token")
        assert (token.token_id, token.index, token.finish) == (next_token(ids), 0, None)
        ticket = list(stand.decode.tickets.values())[-1]
        assert ticket.state == "committed" and ticket.request.transport == ("shm" if transport == "auto" else transport)
        stand.decode.assert_all_kv_arrived(ticket)
        (commit,) = ticket.commits
        assert commit.pages_sent == len(ticket.page_ids) and not commit.page_crc32
        assert [(t.uid, t.token_id, t.finish) for t in commit.first_tokens] == [(uid, token.token_id, 0)]
    assert stand.decode.calls.count("Pair") == 1


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_pages_the_decode_worker_holds_are_not_sent(stands: Stands, transport: str) -> None:
    stand = await stands(transport=transport)
    stand.decode.prefix_len = 8
    await stand.finish(stand.submit(range(18)))
    assert stand.decode.ticket.commits[0].pages_sent == 3
    stand.decode.assert_all_kv_arrived(stand.decode.ticket)
    stand.decode.prefix_len = 16  # All of the next prompt: nothing to send, and still committed (HND-04).
    await stand.finish(stand.submit(range(16)))
    assert [t.state for t in stand.decode.tickets.values()] == ["committed"] * 2
    assert list(stand.decode.tickets.values())[1].commits[0].pages_sent == 0


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_verify_sends_the_checksum_of_every_page(stands: Stands, transport: str) -> None:
    stand = await stands(transport=transport, verify=True)
    stand.decode.prefix_len = 4
    await stand.finish(stand.submit(range(15)))
    ticket = stand.decode.ticket
    pages = [stand.decode.pool[page_range(page, stand.decode.page_bytes)] for page in ticket.page_ids]
    assert ticket.request.verify and list(ticket.commits[0].page_crc32) == [zlib.crc32(page) for page in pages]


async def test_a_single_token_request_reserves_nothing_HND_02(stands: Stands) -> None:
    stand = await stands()
    await stand.finish(stand.submit(IDS, output_len=1))
    assert stand.report.kinds == ["started", "first_token"]
    assert stand.report.all("first_token")[0].finish is FinishReason.LENGTH
    assert stand.decode.calls == []


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_first_token_that_ends_the_request_releases_the_ticket_unused(stands: Stands, transport: str) -> None:
    stand = await stands(transport=transport, next_token=lambda history, completion: EOS)
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds == ["started", "first_token"]
    assert stand.report.all("first_token")[0].finish is FinishReason.STOP
    await eventually(lambda: stand.decode.ticket.state == "released", within=2)
    assert "Commit" not in stand.decode.calls


async def test_of_n_completions_only_those_that_go_on_are_handed_off(stands: Stands) -> None:
    stand = await stands(next_token=lambda history, completion: EOS if completion == 1 else 5 + completion)
    await stand.finish(stand.submit(IDS, uid=4, n=3))
    assert [token.key.uid for token in stand.report.all("first_token")] == [4, 5, 6]
    assert [key.uid for key in stand.report.all("handed_off")] == [4, 6]
    tokens = stand.decode.ticket.commits[0].first_tokens
    assert [(t.uid, t.token_id, t.finish) for t in tokens] == [(4, 5, 0), (5, EOS, 1), (6, 7, 0)]


async def test_a_completion_given_up_before_the_commit_is_not_run(stands: Stands) -> None:
    stand, go = await stands(), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    journey = stand.submit(IDS, uid=1, n=2)
    await eventually(lambda: journey.state is State.RESERVING, within=2)
    stand.worker.journeys.cancel(journey.keys[1])
    go.set()
    await stand.finish(journey)
    assert [token.key.uid for token in stand.report.all("first_token")] == [1]
    assert [key.uid for key in stand.report.all("handed_off")] == [1]
    assert [t.finish for t in stand.decode.ticket.commits[0].first_tokens] == [0, int(FinishReason.ABORT)]


async def test_reserve_is_the_back_pressure_and_waits_as_long_as_the_deadline_lets_it(stands: Stands) -> None:
    stand, go = await stands(lease_ms=1000), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    journey = stand.submit(IDS)
    await asyncio.sleep(1.2)  # Longer than the lease: it must count from the answer, not from the question.
    assert journey.state is State.RESERVING and stand.report.kinds == []
    go.set()
    await stand.finish(journey)
    assert stand.report.kinds[-1] == "handed_off"


async def test_what_the_decode_worker_is_told_of_the_deadline_is_what_is_left_of_it(stands: Stands) -> None:
    stand = await stands()
    await stand.finish(stand.submit(IDS, deadline=5.0))
    assert 4000 < stand.decode.ticket.request.req.deadline_ms <= 5000


@pytest.mark.parametrize("method", ["Pair", "Reserve", "Push", "Commit"])
async def test_the_deadline_ends_a_request_wherever_it_waits_CAN_08(stands: Stands, method: str) -> None:
    stand, go = await stands(transport="grpc"), asyncio.Event()
    stand.decode.before[method] = waits(go)
    journey = stand.submit(IDS, deadline=0.3)
    await stand.finish(journey, within=2)
    failure = stand.report.failure
    assert failure.code == Status.DEADLINE_EXCEEDED.value[0] and not failure.retryable
    go.set()  # What is granted or committed too late is given back or refused.


async def test_a_prompt_that_never_fits_is_refused_without_asking_the_decode_worker_HND_01(stands: Stands) -> None:
    stand = await stands(num_pages=2, max_context=128)
    await stand.finish(stand.submit(IDS))
    failure = stand.report.failure
    assert failure.code == Status.OUT_OF_RANGE.value[0] and not failure.retryable
    assert "2 pages" in failure.message and "10 tokens" in failure.message
    assert stand.decode.calls == [] and stand.report.kinds == ["failed"]


@pytest.mark.parametrize(
    ("method", "transport"),
    [
        ("Pair", "grpc"),
        ("Pair", "shm"),
        ("Reserve", "grpc"),
        ("Reserve", "shm"),
        ("Push", "grpc"),
        ("Commit", "grpc"),
        ("Commit", "shm"),
    ],
)
async def test_a_cancel_in_any_state_frees_everything_and_says_nothing_CAN_02(
    stands: Stands, method: str, transport: str
) -> None:
    stand, go = await stands(transport=transport), asyncio.Event()
    stand.decode.before[method] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: method in stand.decode.calls, within=2)
    stand.worker.journeys.cancel(journey.key)
    await stand.finish(journey, within=2)
    assert stand.report.all("failed") == [] and stand.report.all("handed_off") == []
    stand.worker.journeys.cancel(journey.key)
    go.set()


async def test_a_cancel_while_computing_stops_within_one_chunk_CAN_01(stands: Stands) -> None:
    stand = await stands(chunk_tokens=1, before_run=lambda batch: time.sleep(0.02))
    journey = stand.submit(range(120))
    await eventually(lambda: stand.runner.computed_tokens > 2, within=2)
    stand.worker.journeys.cancel(journey.key)
    await stand.finish(journey, within=0.5)
    assert stand.runner.computed_tokens < 60


async def test_a_queued_request_is_cancelled_without_having_asked_for_anything(stands: Stands) -> None:
    stand, go = await stands(max_running=1), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    first, second = stand.submit(IDS), stand.submit(IDS)
    await eventually(lambda: first.state is State.RESERVING, within=2)
    assert second.state is State.QUEUED
    stand.worker.journeys.cancel(second.key)
    await stand.finish(second, within=1)
    go.set()
    await stand.finish(first)
    assert len(stand.decode.tickets) == 1


async def test_a_request_cancelled_before_its_first_step_is_told_why_it_ended(stands: Stands) -> None:
    stand = await stands()
    journey = stand.submit(IDS)
    journey.end(Unavailable("shutting down"))
    await stand.finish(journey)
    assert stand.report.failure.message == "shutting down" and stand.decode.calls == []


async def test_many_requests_at_once_all_arrive_HND_05(stands: Stands) -> None:
    stand = await stands(num_pages=24, max_running=3)
    prompts = [[(i * j) % 200 for j in range(1, 6 + 3 * i)] for i in range(12)]
    reports = [Recorder() for _ in prompts]
    journeys = [stand.submit(ids, report=report) for ids, report in zip(prompts, reports, strict=True)]
    for journey in journeys:
        await stand.finish(journey)
    for ids, report in zip(prompts, reports, strict=True):
        assert report.kinds == ["started", "first_token", "handed_off"]
        assert report.all("first_token")[0].token_id == next_token(ids)
    for ticket in stand.decode.tickets.values():
        stand.decode.assert_all_kv_arrived(ticket)


async def test_tokens_hand_offs_and_failures_are_counted(stands: Stands) -> None:
    stand = await stands(transport="grpc")
    await stand.finish(stand.submit(IDS))
    await stand.finish(stand.submit([*IDS, 99]))
    stand.decode.before["Commit"] = aborts(Status.DATA_LOSS)
    await stand.finish(stand.submit([5, 6]))
    count = stand.registry.get_sample_value
    await eventually(lambda: count("pdserve_prefill_tokens_total") == 10 + 3 + 2, within=2)
    assert count("pdserve_handoffs_total", {"transport": "grpc"}) == 2
    assert count("pdserve_failures_total", {"code": "DATA_LOSS"}) == 1


async def test_too_many_requests_are_refused_with_the_number_CAP_06(stands: Stands) -> None:
    stand, go = await stands(max_requests=2), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    journeys = [stand.submit(IDS), stand.submit(IDS)]
    with pytest.raises(Exception, match="has 2 requests, which is its limit"):
        stand.submit(IDS)
    journeys[0].end(None)
    journeys.append(stand.submit(IDS))  # The place of one that only cleans up is free: routers count it as gone.
    with pytest.raises(Exception, match="has 2 requests, which is its limit"):
        stand.submit(IDS)
    go.set()
    for journey in journeys:
        await stand.finish(journey)
