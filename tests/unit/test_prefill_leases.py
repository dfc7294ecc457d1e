"""Tickets at a decode worker: renewed while in use, lost, given back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from common.errors import PdserveError
from common.work_key import WorkKey
from prefill_worker.lease import Lease
from prefill_worker.leases import Leases
from prefill_worker.pairing import Pairing
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import aborts, waits
from tests.helpers.fake_runner import EOS
from tests.helpers.prefill_stand import Stands

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode


async def test_a_ticket_granted_after_a_wait_longer_than_its_lease_does_not_run_out_while_it_is_renewed(
    stands: Stands,
) -> None:
    stand, go = await stands(lease_ms=1500), asyncio.Event()

    async def slow(request: Any, context: Any) -> None:
        await asyncio.sleep(0.1)  # A decode worker answers between two steps.

    stand.decode.before["Renew"] = slow
    stand.decode.before["Reserve"] = waits(go)
    journey = stand.submit(IDS)
    await asyncio.sleep(1.6)
    go.set()
    await stand.finish(journey)
    assert stand.report.kinds == ["started", "first_token", "handed_off"]


async def test_a_ticket_granted_after_the_request_was_cancelled_is_given_back(stands: Stands) -> None:
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


async def test_a_lost_lease_found_while_committing_does_not_undo_a_commit_that_succeeds(stands: Stands) -> None:
    stand, go = await stands(lease_ms=3000), asyncio.Event()
    stand.decode.after["Commit"] = waits(go)
    journey = stand.submit(IDS)
    await eventually(lambda: "Renew" in stand.decode.calls, within=2)
    go.set()
    await stand.finish(journey)
    assert stand.report.kinds[-1] == "handed_off"


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_lease_is_renewed_while_the_prompt_is_being_computed(stands: Stands, transport: str) -> None:
    stand = await stands(transport=transport, lease_ms=1500, chunk_tokens=1, before_run=lambda batch: time.sleep(0.2))
    await stand.finish(stand.submit(IDS))
    assert stand.report.kinds[-1] == "handed_off" and stand.decode.ticket.renewals >= 3


async def test_one_call_renews_all_leases_of_a_decode_worker(stands: Stands) -> None:
    stand, go = await stands(lease_ms=1500), asyncio.Event()
    stand.decode.before["Commit"] = waits(go)
    journeys = [stand.submit([i], uid=i) for i in (1, 2, 3)]
    await eventually(lambda: all(t.renewals for t in stand.decode.tickets.values()) and len(stand.decode.tickets) == 3, within=2)
    assert stand.decode.calls.count("Renew") < sum(ticket.renewals for ticket in stand.decode.tickets.values())
    go.set()
    for journey in journeys:
        await stand.finish(journey)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_lease_the_decode_worker_ended_stops_the_request_at_the_next_renewal(stands: Stands, transport: str) -> None:
    stand = await stands(transport=transport, lease_ms=300, chunk_tokens=1, before_run=lambda batch: time.sleep(0.05))
    journey = stand.submit(range(100))
    await eventually(lambda: stand.decode.tickets, within=2)
    stand.decode.ticket.state, stand.decode.ticket.drained = "released", True
    await stand.finish(journey, within=2)
    assert "lease" in stand.report.failure.message and stand.report.failure.retryable
    assert stand.runner.computed_tokens < 50


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_lease_that_cannot_be_renewed_runs_out_and_nothing_is_written_after_it(stands: Stands, transport: str) -> None:
    stand = await stands(transport=transport, lease_ms=400, chunk_tokens=1, before_run=lambda batch: time.sleep(0.05))
    stand.decode.before["Renew"] = aborts(Status.UNAVAILABLE)
    began = time.monotonic()
    await stand.finish(stand.submit(range(100)), within=3)
    assert time.monotonic() - began < 4  # All of its chunks take 5 s.
    assert "lease" in stand.report.failure.message and stand.report.failure.retryable
    before = bytes(stand.decode.pool)
    await asyncio.sleep(0.1)
    assert bytes(stand.decode.pool) == before


async def test_a_release_is_repeated_until_the_decode_worker_hears_it(stands: Stands) -> None:
    stand = await stands(transport="shm", next_token=lambda history, completion: EOS)
    stand.decode.before["Release"] = aborts(Status.UNAVAILABLE, times=4)
    await stand.finish(stand.submit(IDS))
    assert stand.decode.ticket.state == "reserved"
    await eventually(lambda: stand.decode.ticket.state == "released", within=3)


class BrokenStub:
    """A DecodeServiceStub whose first Renew is a mistake in the program."""

    def __init__(self) -> None:
        self.renewals = 0

    async def Renew(self, request: Any, *, timeout: float) -> Any:
        self.renewals += 1
        if self.renewals == 1:
            raise RuntimeError("a mistake")
        return type("Renewed", (), {"lost": []})


def lease_of(uid: int, lost: list[PdserveError]) -> Lease:
    engine: Any = None
    pairing = Pairing(pair_id="p", worker_id="d", transport="grpc", link=None, engine=engine, on_gone=lambda pairing: None)
    pairing.hold()
    deadline = time.monotonic() + 60
    return Lease(WorkKey(1, uid, 1), "", f"ticket {uid}", pairing, (), 0, 0.03, deadline, lost.append)


async def test_leases_are_lost_at_once_when_renewing_them_breaks_and_later_ones_are_renewed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub: Any = BrokenStub()
    leases = Leases(stub, post=lambda command: None, clock=time.monotonic)
    lost: list[PdserveError] = []
    leases.keep(lease_of(1, lost))
    await eventually(lambda: bool(lost), within=5)
    assert "internal error" in str(lost[0]) and "a mistake" in caplog.text and leases.is_idle
    leases.keep(lease_of(2, lost))
    await eventually(lambda: stub.renewals >= 3, within=5)
    assert len(lost) == 1
    await leases.close(patience_seconds=0)
