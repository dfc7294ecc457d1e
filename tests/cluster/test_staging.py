"""Workers whose pools their event loops cannot address, over real gRPC: pages go through few slots, and all arrive."""

from __future__ import annotations

import asyncio

import pytest

from common.handoff.base import page_checksum
from tests.helpers.decode_core import make_req
from tests.helpers.decode_worker import Peers, decode_worker
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import FakeDecode
from tests.helpers.fake_runner import continuation
from tests.helpers.prefill_stand import PrefillStand


@pytest.mark.parametrize("slots", [1, 2, 5])
async def test_a_decode_worker_takes_many_prompts_at_once_through_few_slots(slots: int) -> None:
    async with decode_worker(pages=64, slots=slots) as peers:
        router, pairing = await peers.session(), await peers.pair()
        assert (pairing.shm_socket, pairing.page_bytes, pairing.pool_pages) == ("", 32, 64)
        prompts = {uid: list(range(uid, uid + 11 + uid)) for uid in range(1, 7)}
        await asyncio.gather(*(hand_over(peers, ids, uid, pairing.pair_id, verify=uid % 2 == 0) for uid, ids in prompts.items()))
        await eventually(lambda: all(map(router.has_finished, prompts)), within=5)
        for uid, ids in prompts.items():
            assert [token.token_id for token in router.tokens(uid)] == continuation(ids, 6)
        await peers.assert_idle()
        assert peers.free_slots == slots


async def test_a_ticket_released_in_mid_transfer_gives_back_its_slot() -> None:
    async with decode_worker(slots=1) as peers:
        router, pairing = await peers.session(), await peers.pair()
        req = make_req(range(10), uid=1)
        granted = await peers.reserve(req, pairing.pair_id)
        half = peers.page_bytes_of(req, granted)[0][:16]
        call = peers.handoff.Push()
        await call.write(peers.frame(granted.ticket, half))
        await eventually(lambda: peers.free_slots == 0, within=2)
        await peers.release(granted.ticket)
        await eventually(lambda: peers.free_slots == 1, within=2)
        await hand_over(peers, list(range(9)), 2, pairing.pair_id)
        await eventually(lambda: router.has_finished(2), within=2)
        await peers.assert_idle()


async def hand_over(peers: Peers, ids: list[int], uid: int, pair_id: str, *, verify: bool = False) -> None:
    req = make_req(ids, uid=uid, output_len=6)
    granted = await peers.reserve(req, pair_id, verify=verify)
    pages = peers.page_bytes_of(req, granted)
    await peers.push(granted.ticket, pages)
    await peers.commit(req, granted, crcs=[page_checksum(page) for page in pages] if verify else [])


@pytest.mark.parametrize("slots", [1, 3, 8])
async def test_a_prefill_worker_sends_many_prompts_at_once_through_few_slots(slots: int) -> None:
    decode = FakeDecode()
    await decode.start()
    try:
        # It does not take the shm that is offered: its pages cannot be copied from where they are.
        async with PrefillStand(decode, transport="auto", verify=True, slots=slots, num_pages=64, max_running=8) as stand:
            journeys = [stand.submit(range(uid, uid + 9 + 3 * uid)) for uid in range(1, 7)]
            for journey in journeys:
                await stand.finish(journey)
            assert stand.report.kinds.count("handed_off") == 6 and not stand.report.all("failed")
            for ticket in decode.tickets.values():
                assert ticket.request.transport == "grpc"
                decode.assert_all_kv_arrived(ticket)
    finally:
        await decode.stop()


async def test_a_prompt_whose_receiver_stalls_holds_up_no_other_and_gives_back_its_slots() -> None:
    decode = FakeDecode()
    await decode.start()
    stuck = asyncio.Event()

    async def stall(frame: object, context: object) -> None:
        if frame.ticket == next(iter(decode.tickets)):  # type: ignore[attr-defined]
            await stuck.wait()

    decode.before["Push"] = stall
    try:
        async with PrefillStand(decode, transport="grpc", slots=4, num_pages=64, transfer_timeout=5) as stand:
            slow = stand.submit(range(40))
            await eventually(lambda: "Push" in decode.calls, within=5)
            quick = stand.submit(range(50, 90))
            await stand.finish(quick)
            assert not slow.task.done()
            slow.end(None)
            await stand.finish(slow)
    finally:
        stuck.set()
        await decode.stop()
