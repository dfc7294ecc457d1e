"""Pairings, Reserves, transfers and Commits that a decode worker refuses, does not answer or does not survive."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import aborts, is_closed, waits
from tests.helpers.prefill_stand import Recorder, Stands

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode


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
    stands: Stands, code: grpc.StatusCode, retryable: bool
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


async def test_incompatible_workers_are_told_apart_from_faults(stands: Stands) -> None:
    stand = await stands()
    stand.decode.before["Pair"] = aborts(Status.FAILED_PRECONDITION, "page_size differs: 4 there, 8 here")
    await stand.finish(stand.submit(IDS))
    failure = stand.report.failure
    assert (failure.code, failure.retryable) == (Status.FAILED_PRECONDITION.value[0], False)
    assert "page_size differs" in failure.message


async def test_a_pool_with_other_pages_is_refused_naming_both_sizes(stands: Stands) -> None:
    stand = await stands()
    stand.decode.page_bytes *= 2
    await stand.finish(stand.submit(IDS))
    assert "page_bytes differs: 64 there, 32 here" in stand.report.failure.message


async def test_forced_shm_that_is_impossible_fails_the_request_and_never_falls_back(stands: Stands) -> None:
    stand = await stands(transport="shm", offer_shm=False)
    await stand.finish(stand.submit(IDS))
    assert "--transport shm is impossible" in stand.report.failure.message and not stand.report.failure.retryable
    assert "Reserve" not in stand.decode.calls


async def test_a_decode_worker_that_is_not_there_is_unavailable_at_once(stands: Stands) -> None:
    stand = await stands()
    await stand.decode.stop()
    await stand.finish(stand.submit(IDS), within=6)
    failure = stand.report.failure
    assert failure.code == Status.UNAVAILABLE.value[0] and failure.retryable
    await stand.decode.start()


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_restarted_decode_worker_is_paired_with_again(stands: Stands, transport: str) -> None:
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
    stands: Stands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_worker.pairing.PAIR_SECONDS", 0.1)
    stand, go = await stands(), asyncio.Event()
    stand.decode.before["Pair"] = waits(go)
    await stand.finish(stand.submit(IDS), within=2)
    failure = stand.report.failure
    assert (failure.code, failure.retryable) == (Status.UNAVAILABLE.value[0], True)
    assert stand.decode.address in failure.message
    go.set()


async def test_a_forgotten_pairing_is_renewed_once_within_the_request(stands: Stands) -> None:
    stand = await stands(transport="grpc")
    await stand.finish(stand.submit(IDS))
    stand.decode.pairs.clear()
    await stand.finish(stand.submit(IDS))
    assert stand.report.all("failed") == [] and stand.decode.calls.count("Pair") == 2
    stand.decode.before["Reserve"] = aborts(Status.FAILED_PRECONDITION, "pair again")
    await stand.finish(stand.submit(IDS))
    assert stand.report.failure.retryable and stand.decode.calls.count("Pair") == 3


async def test_a_successor_on_the_same_port_is_not_taken_for_the_worker_that_was_meant(stands: Stands) -> None:
    stand = await stands()
    await stand.finish(stand.submit(IDS, decode_worker="decode-former"))
    failure = stand.report.failure
    assert failure.retryable and "decode-former is gone" in failure.message and stand.decode.worker_id in failure.message
    assert "Reserve" not in stand.decode.calls


async def test_a_decode_worker_that_dies_mid_push_ends_the_request_at_once_HND_09(stands: Stands) -> None:
    stand, go = await stands(transport="grpc", lease_ms=60_000), asyncio.Event()
    stand.decode.before["Push"] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: "Push" in stand.decode.calls, within=2)
    await stand.decode.stop()
    await stand.finish(journey, within=2)
    assert stand.report.failure.code == Status.UNAVAILABLE.value[0] and stand.report.failure.retryable
    await stand.decode.start()


async def test_a_decode_worker_that_dies_while_shm_is_open_ends_the_request_at_once(stands: Stands) -> None:
    slow = asyncio.Event()
    stand = await stands(transport="shm", lease_ms=60_000)
    stand.decode.before["Commit"] = waits(slow)
    journey = stand.submit(IDS)
    await eventually(lambda: "Commit" in stand.decode.calls, within=2)
    await stand.decode.stop()
    await stand.finish(journey, within=2)
    assert "ended with that worker" in stand.report.failure.message and stand.report.failure.retryable
    await stand.decode.start()


async def test_a_transfer_that_stalls_is_given_up_after_the_transfer_timeout_HND_07(stands: Stands) -> None:
    stand, go = await stands(transport="grpc", transfer_timeout=0.3), asyncio.Event()
    stand.decode.before["Push"] = waits(go)
    await stand.finish(stand.submit(IDS), within=2)
    assert "transfer timeout" in stand.report.failure.message and stand.report.failure.retryable


async def test_a_refused_commit_fails_the_attempt_after_the_first_token_was_told(stands: Stands) -> None:
    stand = await stands()
    stand.decode.before["Commit"] = aborts(Status.DATA_LOSS, "page 1: checksum differs")
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds == ["started", "first_token", "failed"]
    failure = stand.report.failure
    assert (failure.code, failure.retryable) == (Status.DATA_LOSS.value[0], True)


async def test_an_unanswered_commit_is_repeated_until_it_is(stands: Stands) -> None:
    stand = await stands(lease_ms=3000)
    stand.decode.after["Commit"] = aborts(Status.UNAVAILABLE, times=3)
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds[-1] == "handed_off" and len(stand.decode.ticket.commits) == 4
    assert stand.decode.calls.count("Release") == 0


async def test_a_commit_that_is_never_answered_fails_the_attempt_when_the_time_is_over(stands: Stands) -> None:
    stand, never = await stands(lease_ms=300, transfer_timeout=0.5), asyncio.Event()
    stand.decode.before["Commit"] = waits(never)
    await stand.finish(stand.submit(IDS), within=2)
    assert "did not answer Commit" in stand.report.failure.message and stand.report.failure.retryable
    never.set()


async def test_an_unanswered_reserve_with_shm_ends_the_pairing_so_that_nothing_stays_withheld(stands: Stands) -> None:
    stand = await stands(transport="shm")
    stand.decode.after["Reserve"] = aborts(Status.UNAVAILABLE, times=1)
    await stand.finish(stand.submit(IDS))
    (lost,) = stand.decode.tickets.values()
    connection = stand.decode.connections[lost.request.pair_id]
    await eventually(lambda: is_closed(connection), within=2)
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds[-1] == "handed_off" and stand.decode.calls.count("Pair") == 2


async def test_closing_the_worker_unmaps_and_hangs_up(stands: Stands) -> None:
    stand = await stands(transport="shm")
    await stand.finish(stand.submit(IDS))
    (connection,) = stand.decode.connections.values()
    assert not is_closed(connection)
    await stand.assert_idle()
    await stand.worker.close()
    assert is_closed(connection)
