"""A decode worker that says nothing, and one that only seems to, because this process stood still."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from tests.helpers.eventually import eventually, stand_still
from tests.helpers.fake_decode import waits
from tests.helpers.prefill_stand import PrefillStand, Stands
from tests.helpers.relay import Relay

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode


async def cut_off_at(moment: str, stand: PrefillStand, relay: Relay, *, until: asyncio.Event) -> Any:
    """A journey whose decode worker is cut off during that call of it; but for Renew it answers no sooner than until."""
    stand.decode.address = relay.address
    if moment != "Renew":
        stand.decode.before[moment] = waits(until)
    journey = stand.submit(IDS)
    await eventually(lambda: moment in stand.decode.calls, within=3)
    relay.is_whole.clear()
    return journey


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("moment", ["Reserve", "Renew", "Push", "Commit"])
async def test_a_decode_worker_that_falls_silent_fails_the_attempt_in_less_than_2_s_HND_09(
    stands: Stands, monkeypatch: pytest.MonkeyPatch, moment: str, transport: str
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


@pytest.mark.parametrize("moment", ["Reserve", "Renew", "Commit"])
async def test_a_decode_worker_that_is_silent_still_when_it_is_asked_again_fails_the_attempt(
    stands: Stands, monkeypatch: pytest.MonkeyPatch, moment: str
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
    stands: Stands, monkeypatch: pytest.MonkeyPatch, moment: str, stood_still: bool
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
