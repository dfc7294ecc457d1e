"""One request's way on a prefill worker, against a decode worker that does what the test wants, over real gRPC."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from common.errors import Unavailable
from common.handoff.base import page_range
from common.work import FinishReason
from prefill_worker.states import State
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import FakeDecode, is_closed
from tests.helpers.fake_runner import EOS, next_token
from tests.helpers.prefill_stand import PrefillStand, Recorder
from tests.helpers.relay import Relay
from tests.unit.test_common_pauses import stand_still

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode
Make = Callable[..., Awaitable[PrefillStand]]


@pytest.fixture
async def stands() -> AsyncIterator[Make]:
    """Makes a prefill worker with its decode worker; both are checked and closed at the end."""
    async with AsyncExitStack() as stack:

        async def make(*, lease_ms: int = 10_000, offer_shm: bool = True, **kwargs: Any) -> PrefillStand:
            decode = FakeDecode(lease_ms=lease_ms, offer_shm=offer_shm)
            await decode.start()
            stack.push_async_callback(decode.stop)
            return await stack.enter_async_context(PrefillStand(decode, **kwargs))

        yield make


def aborts(code: grpc.StatusCode, text: str = "no", *, times: int = 10**9) -> Any:
    """A hook that ends the first `times` calls with this status."""
    left = times

    async def hook(request: Any, context: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            await context.abort(code, text)

    return hook


def waits(event: asyncio.Event) -> Any:
    async def hook(request: Any, context: Any) -> None:
        await event.wait()

    return hook


async def cut_off_at(moment: str, stand: PrefillStand, relay: Relay, *, until: asyncio.Event) -> Any:
    """A journey whose decode worker is cut off during that call of it; but for Renew it answers no sooner than until."""
    stand.decode.address = relay.address
    if moment != "Renew":
        stand.decode.before[moment] = waits(until)
    journey = stand.submit(IDS)
    await eventually(lambda: moment in stand.decode.calls, within=3)
    relay.is_whole.clear()
    return journey


@pytest.mark.parametrize("transport", ["grpc", "shm", "auto"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 33])
async def test_every_byte_and_the_first_token_arrive_BND_05(stands: Make, transport: str, length: int) -> None:
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
async def test_pages_the_decode_worker_holds_are_not_sent(stands: Make, transport: str) -> None:
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
async def test_verify_sends_the_checksum_of_every_page(stands: Make, transport: str) -> None:
    stand = await stands(transport=transport, verify=True)
    stand.decode.prefix_len = 4
    await stand.finish(stand.submit(range(15)))
    ticket = stand.decode.ticket
    pages = [stand.decode.pool[page_range(page, stand.decode.page_bytes)] for page in ticket.page_ids]
    assert ticket.request.verify and list(ticket.commits[0].page_crc32) == [zlib.crc32(page) for page in pages]


async def test_a_single_token_request_reserves_nothing_HND_02(stands: Make) -> None:
    stand = await stands()
    await stand.finish(stand.submit(IDS, output_len=1))
    assert stand.report.kinds == ["started", "first_token"]
    assert stand.report.all("first_token")[0].finish is FinishReason.LENGTH
    assert stand.decode.calls == []


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_first_token_that_ends_the_request_releases_the_ticket_unused(stands: Make, transport: str) -> None:
    stand = await stands(transport=transport, next_token=lambda history, completion: EOS)
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds == ["started", "first_token"]
    assert stand.report.all("first_token")[0].finish is FinishReason.STOP
    await eventually(lambda: stand.decode.ticket.state == "released", within=2)
    assert "Commit" not in stand.decode.calls


async def test_of_n_completions_only_those_that_go_on_are_handed_off(stands: Make) -> None:
    stand = await stands(next_token=lambda history, completion: EOS if completion == 1 else 5 + completion)
    await stand.finish(stand.submit(IDS, uid=4, n=3))
    assert [token.key.uid for token in stand.report.all("first_token")] == [4, 5, 6]
    assert [key.uid for key in stand.report.all("handed_off")] == [4, 6]
    tokens = stand.decode.ticket.commits[0].first_tokens
    assert [(t.uid, t.token_id, t.finish) for t in tokens] == [(4, 5, 0), (5, EOS, 1), (6, 7, 0)]


async def test_a_completion_given_up_before_the_commit_is_not_run(stands: Make) -> None:
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


async def test_reserve_is_the_back_pressure_and_waits_as_long_as_the_deadline_lets_it(stands: Make) -> None:
    stand, go = await stands(lease_ms=300), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    journey = stand.submit(IDS)
    await asyncio.sleep(0.5)  # Longer than the lease: it must count from the answer, not from the question.
    assert journey.state is State.RESERVING and stand.report.kinds == []
    go.set()
    await stand.finish(journey)
    assert stand.report.kinds[-1] == "handed_off"


async def test_a_ticket_granted_after_a_wait_longer_than_its_lease_does_not_run_out_while_it_is_renewed(stands: Make) -> None:
    stand, go = await stands(lease_ms=600), asyncio.Event()

    async def slow(request: Any, context: Any) -> None:
        await asyncio.sleep(0.1)  # A decode worker answers between two steps.

    stand.decode.before["Renew"] = slow
    stand.decode.before["Reserve"] = waits(go)
    journey = stand.submit(IDS)
    await asyncio.sleep(0.7)
    go.set()
    await stand.finish(journey)
    assert stand.report.kinds == ["started", "first_token", "handed_off"]


async def test_what_the_decode_worker_is_told_of_the_deadline_is_what_is_left_of_it(stands: Make) -> None:
    stand = await stands()
    await stand.finish(stand.submit(IDS, deadline=5.0))
    assert 4000 < stand.decode.ticket.request.req.deadline_ms <= 5000


@pytest.mark.parametrize("method", ["Pair", "Reserve", "Push", "Commit"])
async def test_the_deadline_ends_a_request_wherever_it_waits_CAN_08(stands: Make, method: str) -> None:
    stand, go = await stands(transport="grpc"), asyncio.Event()
    stand.decode.before[method] = waits(go)
    journey = stand.submit(IDS, deadline=0.3)
    await stand.finish(journey, within=2)
    failure = stand.report.failure
    assert failure.code == Status.DEADLINE_EXCEEDED.value[0] and not failure.retryable
    go.set()  # What is granted or committed too late is given back or refused.


async def test_a_ticket_granted_after_the_request_was_cancelled_is_given_back(stands: Make) -> None:
    stand, go = await stands(transport="shm"), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: "Reserve" in stand.decode.calls, within=2)
    journey.end(None)
    await stand.finish(journey, within=1)
    assert not stand.decode.tickets
    go.set()
    await eventually(lambda: stand.decode.tickets and stand.decode.ticket.state == "released", within=2)
    assert stand.report.kinds == []


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        (Status.UNAVAILABLE, True),
        (Status.RESOURCE_EXHAUSTED, True),
        (Status.ABORTED, True),
        (Status.OUT_OF_RANGE, False),
        (Status.INVALID_ARGUMENT, False),
    ],
)
async def test_a_refused_reserve_reaches_the_router_with_its_status_HND_11(
    stands: Make, code: grpc.StatusCode, retryable: bool
) -> None:
    stand = await stands()
    stand.decode.before["Reserve"] = aborts(code, "pool is 3 pages")
    await stand.finish(stand.submit(IDS, n=2))
    failures = stand.report.all("failed")
    assert [failure.key.uid for failure in failures] == [1, 2]
    assert {(failure.code, failure.message, failure.retryable) for failure in failures} == {
        (code.value[0], "pool is 3 pages", retryable)
    }
    assert stand.report.kinds == ["failed", "failed"]  # And no token from it.


async def test_a_prompt_that_never_fits_is_refused_without_asking_the_decode_worker_HND_01(stands: Make) -> None:
    stand = await stands(num_pages=2, max_context=128)
    await stand.finish(stand.submit(IDS))
    failure = stand.report.failure
    assert failure.code == Status.OUT_OF_RANGE.value[0] and not failure.retryable
    assert "2 pages" in failure.message and "10 tokens" in failure.message
    assert stand.decode.calls == [] and stand.report.kinds == ["failed"]


async def test_incompatible_workers_are_told_apart_from_faults(stands: Make) -> None:
    stand = await stands()
    stand.decode.before["Pair"] = aborts(Status.FAILED_PRECONDITION, "page_size differs: 4 there, 8 here")
    await stand.finish(stand.submit(IDS))
    failure = stand.report.failure
    assert (failure.code, failure.retryable) == (Status.FAILED_PRECONDITION.value[0], False)
    assert "page_size differs" in failure.message


async def test_a_pool_with_other_pages_is_refused_naming_both_sizes(stands: Make) -> None:
    stand = await stands()
    stand.decode.page_bytes *= 2
    await stand.finish(stand.submit(IDS))
    assert "page_bytes differs: 64 there, 32 here" in stand.report.failure.message


async def test_forced_shm_that_is_impossible_fails_the_request_and_never_falls_back(stands: Make) -> None:
    stand = await stands(transport="shm", offer_shm=False)
    await stand.finish(stand.submit(IDS))
    assert "--transport shm is impossible" in stand.report.failure.message and not stand.report.failure.retryable
    assert "Reserve" not in stand.decode.calls


async def test_a_decode_worker_that_is_not_there_is_unavailable_at_once(stands: Make) -> None:
    stand = await stands()
    await stand.decode.stop()
    await stand.finish(stand.submit(IDS), within=6)
    failure = stand.report.failure
    assert failure.code == Status.UNAVAILABLE.value[0] and failure.retryable
    await stand.decode.start()


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_restarted_decode_worker_is_paired_with_again(stands: Make, transport: str) -> None:
    stand = await stands(transport=transport)
    await stand.finish(stand.submit(IDS))
    await stand.decode.stop()
    await stand.decode.start()

    async def handed_off() -> bool:
        report = Recorder()
        await stand.finish(stand.submit(IDS, report=report))
        return report.kinds[-1] == "handed_off"

    await eventually(handed_off, within=5)
    assert len(stand.decode.pairs) == 1


async def test_a_decode_worker_that_does_not_answer_an_introduction_is_worth_another_attempt(
    stands: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_worker.pairing.PAIR_SECONDS", 0.1)
    stand, go = await stands(), asyncio.Event()
    stand.decode.before["Pair"] = waits(go)
    await stand.finish(stand.submit(IDS), within=2)
    failure = stand.report.failure
    assert (failure.code, failure.retryable) == (Status.UNAVAILABLE.value[0], True)
    assert stand.decode.address in failure.message
    go.set()


async def test_a_forgotten_pairing_is_renewed_once_within_the_request(stands: Make) -> None:
    stand = await stands(transport="grpc")
    await stand.finish(stand.submit(IDS))
    stand.decode.pairs.clear()
    await stand.finish(stand.submit(IDS))
    assert stand.report.all("failed") == [] and stand.decode.calls.count("Pair") == 2
    stand.decode.before["Reserve"] = aborts(Status.FAILED_PRECONDITION, "pair again")
    await stand.finish(stand.submit(IDS))
    assert stand.report.failure.retryable and stand.decode.calls.count("Pair") == 3


async def test_a_successor_on_the_same_port_is_not_taken_for_the_worker_that_was_meant(stands: Make) -> None:
    stand = await stands()
    await stand.finish(stand.submit(IDS, decode_worker="decode-former"))
    failure = stand.report.failure
    assert failure.retryable and "decode-former is gone" in failure.message and stand.decode.worker_id in failure.message
    assert "Reserve" not in stand.decode.calls


async def test_a_decode_worker_that_dies_mid_push_ends_the_request_at_once_HND_09(stands: Make) -> None:
    stand, go = await stands(transport="grpc", lease_ms=60_000), asyncio.Event()
    stand.decode.before["Push"] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: "Push" in stand.decode.calls, within=2)
    await stand.decode.stop()
    await stand.finish(journey, within=2)
    assert stand.report.failure.code == Status.UNAVAILABLE.value[0] and stand.report.failure.retryable
    await stand.decode.start()


async def test_a_decode_worker_that_dies_while_shm_is_open_ends_the_request_at_once(stands: Make) -> None:
    slow = asyncio.Event()
    stand = await stands(transport="shm", lease_ms=60_000)
    stand.decode.before["Commit"] = waits(slow)
    journey = stand.submit(IDS)
    await eventually(lambda: "Commit" in stand.decode.calls, within=2)
    await stand.decode.stop()
    await stand.finish(journey, within=2)
    assert "ended with that worker" in stand.report.failure.message and stand.report.failure.retryable
    await stand.decode.start()


async def test_a_transfer_that_stalls_is_given_up_after_the_transfer_timeout_HND_07(stands: Make) -> None:
    stand, go = await stands(transport="grpc", transfer_timeout=0.3), asyncio.Event()
    stand.decode.before["Push"] = waits(go)
    await stand.finish(stand.submit(IDS), within=2)
    assert "transfer timeout" in stand.report.failure.message and stand.report.failure.retryable


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("moment", ["Reserve", "Renew", "Push", "Commit"])
async def test_a_decode_worker_that_falls_silent_fails_the_attempt_in_less_than_2_s_HND_09(
    stands: Make, monkeypatch: pytest.MonkeyPatch, moment: str, transport: str
) -> None:
    monkeypatch.setattr("common.pauses.FRESH_SECONDS", 0.0)  # Whatever else this machine does, we do not stand still.
    if moment == "Push" and transport == "shm":
        pytest.skip("nothing is pushed")
    slow = {"chunk_tokens": 1, "before_run": lambda batch: time.sleep(0.3)} if moment == "Renew" else {}
    stand, never = await stands(transport=transport, transfer_timeout=10, **slow), asyncio.Event()
    there = stand.decode.address
    async with Relay(there) as relay:
        journey = await cut_off_at(moment, stand, relay, until=never)
        began = time.monotonic()
        await eventually(lambda: "failed" in stand.report.kinds, within=4)
        assert time.monotonic() - began < 2.5
        assert "silent" in stand.report.failure.message and stand.report.failure.retryable
        relay.is_whole.set()
        if moment != "Reserve":  # Its call has ended there too: a ticket would be granted to nobody.
            never.set()
        await stand.finish(journey)
        await stand.assert_idle()
    stand.decode.address = there


async def test_a_refused_commit_fails_the_attempt_after_the_first_token_was_told(stands: Make) -> None:
    stand = await stands()
    stand.decode.before["Commit"] = aborts(Status.DATA_LOSS, "page 1: checksum differs")
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds == ["started", "first_token", "failed"]
    failure = stand.report.failure
    assert (failure.code, failure.retryable) == (Status.DATA_LOSS.value[0], True)


async def test_an_unanswered_commit_is_repeated_until_it_is(stands: Make) -> None:
    stand = await stands(lease_ms=600)
    stand.decode.after["Commit"] = aborts(Status.UNAVAILABLE, times=3)
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds[-1] == "handed_off" and len(stand.decode.ticket.commits) == 4
    assert stand.decode.calls.count("Release") == 0


async def test_a_commit_that_is_never_answered_fails_the_attempt_when_the_time_is_over(stands: Make) -> None:
    stand, never = await stands(lease_ms=300, transfer_timeout=0.5), asyncio.Event()
    stand.decode.before["Commit"] = waits(never)
    await stand.finish(stand.submit(IDS), within=2)
    assert "did not answer Commit" in stand.report.failure.message and stand.report.failure.retryable
    never.set()


async def test_a_lost_lease_found_while_committing_does_not_undo_a_commit_that_succeeds(stands: Make) -> None:
    stand, go = await stands(lease_ms=600), asyncio.Event()
    stand.decode.after["Commit"] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: "Renew" in stand.decode.calls, within=2)
    go.set()
    await stand.finish(journey)
    assert stand.report.kinds[-1] == "handed_off"


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_lease_is_renewed_while_the_prompt_is_being_computed(stands: Make, transport: str) -> None:
    stand = await stands(transport=transport, lease_ms=600, chunk_tokens=1, before_run=lambda batch: time.sleep(0.1))
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds[-1] == "handed_off" and stand.decode.ticket.renewals >= 3


async def test_one_call_renews_all_leases_of_a_decode_worker(stands: Make) -> None:
    stand, go = await stands(lease_ms=200), asyncio.Event()
    stand.decode.before["Commit"] = waits(go)
    journeys = [stand.submit([i], uid=i) for i in (1, 2, 3)]
    await eventually(lambda: all(t.renewals for t in stand.decode.tickets.values()) and len(stand.decode.tickets) == 3, within=2)
    assert stand.decode.calls.count("Renew") < sum(ticket.renewals for ticket in stand.decode.tickets.values())
    go.set()
    for journey in journeys:
        await stand.finish(journey)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_lease_the_decode_worker_ended_stops_the_request_at_the_next_renewal(stands: Make, transport: str) -> None:
    stand = await stands(transport=transport, lease_ms=300, chunk_tokens=1, before_run=lambda batch: time.sleep(0.05))
    journey = stand.submit(range(100))
    await eventually(lambda: stand.decode.tickets, within=2)
    stand.decode.ticket.state, stand.decode.ticket.drained = "released", True
    await stand.finish(journey, within=2)
    assert "lease" in stand.report.failure.message and stand.report.failure.retryable
    assert stand.runner.computed_tokens < 50


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_lease_that_cannot_be_renewed_runs_out_and_nothing_is_written_after_it(stands: Make, transport: str) -> None:
    stand = await stands(transport=transport, lease_ms=400, chunk_tokens=1, before_run=lambda batch: time.sleep(0.05))
    stand.decode.before["Renew"] = aborts(Status.UNAVAILABLE)
    began = time.monotonic()
    await stand.finish(stand.submit(range(100)), within=3)
    assert time.monotonic() - began < 2  # All of its chunks take 5 s.
    assert "lease" in stand.report.failure.message and stand.report.failure.retryable
    before = bytes(stand.decode.pool)
    await asyncio.sleep(0.1)
    assert bytes(stand.decode.pool) == before


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
async def test_a_cancel_in_any_state_frees_everything_and_says_nothing_CAN_02(stands: Make, method: str, transport: str) -> None:
    stand, go = await stands(transport=transport), asyncio.Event()
    stand.decode.before[method] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: method in stand.decode.calls, within=2)
    stand.worker.journeys.cancel(journey.key)
    await stand.finish(journey, within=2)
    assert stand.report.all("failed") == [] and stand.report.all("handed_off") == []
    stand.worker.journeys.cancel(journey.key)
    go.set()


async def test_a_cancel_while_computing_stops_within_one_chunk_CAN_01(stands: Make) -> None:
    stand = await stands(chunk_tokens=1, before_run=lambda batch: time.sleep(0.02))
    journey = stand.submit(range(120))
    await eventually(lambda: stand.runner.computed_tokens > 2, within=2)
    stand.worker.journeys.cancel(journey.key)
    await stand.finish(journey, within=0.5)
    assert stand.runner.computed_tokens < 60


async def test_a_queued_request_is_cancelled_without_having_asked_for_anything(stands: Make) -> None:
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


async def test_a_request_cancelled_before_its_first_step_is_told_why_it_ended(stands: Make) -> None:
    stand = await stands()
    journey = stand.submit(IDS)
    journey.end(Unavailable("shutting down"))
    await stand.finish(journey)
    assert stand.report.failure.message == "shutting down" and stand.decode.calls == []


async def test_a_release_is_repeated_until_the_decode_worker_hears_it(stands: Make) -> None:
    stand = await stands(transport="shm", next_token=lambda history, completion: EOS)
    stand.decode.before["Release"] = aborts(Status.UNAVAILABLE, times=4)
    await stand.finish(stand.submit(IDS))
    assert stand.decode.ticket.state == "reserved"
    await eventually(lambda: stand.decode.ticket.state == "released", within=3)


async def test_an_unanswered_reserve_with_shm_ends_the_pairing_so_that_nothing_stays_withheld(stands: Make) -> None:
    stand = await stands(transport="shm")
    stand.decode.after["Reserve"] = aborts(Status.UNAVAILABLE, times=1)
    await stand.finish(stand.submit(IDS))
    (lost,) = stand.decode.tickets.values()
    connection = stand.decode.connections[lost.request.pair_id]
    await eventually(lambda: is_closed(connection), within=2)
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds[-1] == "handed_off" and stand.decode.calls.count("Pair") == 2


async def test_closing_the_worker_unmaps_and_hangs_up(stands: Make) -> None:
    stand = await stands(transport="shm")
    await stand.finish(stand.submit(IDS))
    (connection,) = stand.decode.connections.values()
    assert not is_closed(connection)
    await stand.assert_idle()
    await stand.worker.close()
    assert is_closed(connection)


async def test_many_requests_at_once_all_arrive_HND_05(stands: Make) -> None:
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


async def test_tokens_hand_offs_and_failures_are_counted(stands: Make) -> None:
    stand = await stands(transport="grpc")
    await stand.finish(stand.submit(IDS))
    await stand.finish(stand.submit([*IDS, 99]))
    stand.decode.before["Commit"] = aborts(Status.DATA_LOSS)
    await stand.finish(stand.submit([5, 6]))
    count = stand.registry.get_sample_value
    await eventually(lambda: count("pdserve_prefill_tokens_total") == 10 + 3 + 2, within=2)
    assert count("pdserve_handoffs_total", {"transport": "grpc"}) == 2
    assert count("pdserve_failures_total", {"code": "DATA_LOSS"}) == 1


async def test_too_many_requests_are_refused_with_the_number_CAP_06(stands: Make) -> None:
    stand, go = await stands(max_requests=2), asyncio.Event()
    stand.decode.before["Reserve"] = waits(go)
    journeys = [stand.submit(IDS), stand.submit(IDS)]
    with pytest.raises(Exception, match="has 2 requests, which is its limit"):
        stand.submit(IDS)
    go.set()
    for journey in journeys:
        await stand.finish(journey)


@pytest.mark.parametrize("moment", ["Reserve", "Renew", "Commit"])
async def test_a_decode_worker_that_is_silent_still_when_it_is_asked_again_fails_the_attempt(
    stands: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr("common.pauses.FRESH_SECONDS", 60.0)
    slow = {"chunk_tokens": 1, "before_run": lambda batch: time.sleep(0.3)} if moment == "Renew" else {}
    stand, never = await stands(transport="shm", transfer_timeout=60, lease_ms=60_000, **slow), asyncio.Event()
    there = stand.decode.address
    async with Relay(there) as relay:
        journey = await cut_off_at(moment, stand, relay, until=never)
        stand_still(1.0)
        began = time.monotonic()
        await eventually(lambda: "failed" in stand.report.kinds, within=20)
        assert time.monotonic() - began < 12, "not as long as the lease or the transfer timeout"
        assert stand.report.failure.retryable
        relay.is_whole.set()
        if moment != "Reserve":
            never.set()
        await stand.finish(journey)
        # Until it has been reached again, which may take as long as one attempt to connect.
        await eventually(lambda: all(ticket.state != "reserved" for ticket in stand.decode.tickets.values()), within=20)


@pytest.mark.parametrize("stood_still", [True, False])
@pytest.mark.parametrize("moment", ["Reserve", "Renew", "Commit"])
async def test_who_stood_still_itself_asks_again_before_it_takes_a_decode_worker_for_silent(
    stands: Make, monkeypatch: pytest.MonkeyPatch, moment: str, stood_still: bool
) -> None:
    """As after SIGSTOP and SIGCONT: its timer of a ping runs out before it has read the answer."""
    monkeypatch.setattr("common.pauses.FRESH_SECONDS", 60.0 if stood_still else 0.0)
    slow = {"chunk_tokens": 1, "before_run": lambda batch: time.sleep(0.1)} if moment == "Renew" else {}
    stand, times = await stands(transport="shm", **slow), 0

    async def first_time(request: Any, context: Any) -> None:
        nonlocal times
        times += 1
        if times == 1:
            if stood_still:
                stand_still(1.0)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "ping timeout")

    stand.decode.before[moment] = first_time
    journey = stand.submit([*IDS, *IDS])
    await stand.finish(journey)
    if stood_still:
        assert stand.report.kinds[-1] == "handed_off" and times > 1
        assert stand.decode.calls.count("Pair") == (2 if moment == "Reserve" else 1)
    else:
        assert "silent" in stand.report.failure.message
