"""Shared memory with a real second process as the sender: killed, stopped and well-behaved."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from tests.helpers.decode_core import PROMPT, make_req
from tests.helpers.decode_worker import Peers, decode_worker
from tests.helpers.eventually import eventually
from tests.helpers.fake_runner import continuation
from tests.helpers.sender_process import SenderProcess, pages_are, sender_process

PAGES = 8


@asynccontextmanager
async def sender(peers: Peers) -> AsyncIterator[tuple[SenderProcess, str]]:
    """And its pair id."""
    pairing = await peers.pair()
    async with sender_process("tests.helpers.shm_writer", pairing.shm_socket, pairing.pair_id, kind=SenderProcess) as process:
        yield process, pairing.pair_id


async def test_a_request_sent_through_shared_memory_decodes_right() -> None:
    async with decode_worker(pages=PAGES) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        req = make_req(PROMPT, output_len=6)
        granted = await peers.reserve(req, pair_id, transport="shm")
        await process.fill(peers, req, granted)
        await peers.commit(req, granted)
        await eventually(lambda: router.has_finished(1), within=2)
        assert [token.token_id for token in router.tokens(1)] == continuation(PROMPT, 6)
        await peers.assert_idle()


async def test_flt_03_a_sender_killed_in_the_middle_of_a_write_gives_its_pages_back_by_eof() -> None:
    async with decode_worker(pages=PAGES) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        live = await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="shm")
        ended = await peers.reserve(make_req([*PROMPT[:-1], 5], uid=2), pair_id, transport="shm")
        pages = [*live.page_ids, *ended.page_ids]
        await process.write_for_ever(peers, *pages)
        await router.cancel(2)
        await eventually(lambda: pages_are(peers, held=4, quarantined=3), within=2)
        process.signal(signal.SIGKILL)
        await peers.assert_idle(within=2)  # Long before the lease of 10 s is over.
        failures = [message.failure for message in router.told if message.HasField("failure")]
        assert [(failure.uid, failure.retryable) for failure in failures] == [(1, True)]
        after = bytes(peers.worker.memory.view)
        await asyncio.sleep(0.1)
        assert bytes(peers.worker.memory.view) == after


async def test_hnd_09_a_stopped_sender_keeps_its_pages_in_quarantine_until_it_resumes_and_releases() -> None:
    async with decode_worker(pages=PAGES, lease=timedelta(milliseconds=200)) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        granted = await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="shm")
        await process.write_for_ever(peers, *granted.page_ids)
        process.signal(signal.SIGSTOP)
        await eventually(lambda: pages_are(peers, held=0, quarantined=3), within=2)
        await asyncio.sleep(0.5)  # Leases do not matter any more: only the sender's word does.
        assert await pages_are(peers, held=0, quarantined=3)
        # Meanwhile others are served from the rest, and the late writes hurt nobody.
        grpc_pair = (await peers.pair()).pair_id
        await peers.hand_over(make_req([1, 2, 3], uid=2, output_len=8), grpc_pair)
        process.signal(signal.SIGCONT)
        await peers.hand_over(make_req([4, 5, 6], uid=3, output_len=8), grpc_pair)
        await eventually(lambda: router.has_finished(2) and router.has_finished(3), within=2)
        assert [token.token_id for token in router.tokens(2)] == continuation([1, 2, 3], 8)
        assert [token.token_id for token in router.tokens(3)] == continuation([4, 5, 6], 8)
        assert await pages_are(peers, held=0, quarantined=3)
        await process.order("stop", answer="stopped")
        await peers.release(granted.ticket, drained=True)
        await peers.assert_idle()


async def test_a_stopped_sender_that_dies_gives_its_pages_back() -> None:
    async with decode_worker(pages=PAGES, lease=timedelta(milliseconds=200)) as peers, sender(peers) as (process, pair_id):
        await peers.session()
        granted = await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="shm")
        await process.write_for_ever(peers, *granted.page_ids)
        process.signal(signal.SIGSTOP)
        await eventually(lambda: pages_are(peers, held=0, quarantined=3), within=2)
        process.signal(signal.SIGKILL)
        await peers.assert_idle(within=2)


async def test_without_shm_no_socket_is_offered_and_grpc_is() -> None:
    async with decode_worker(offer_shm=False) as peers:
        router, pairing = await peers.session(), await peers.pair()
        assert pairing.shm_socket == ""
        await peers.hand_over(make_req(PROMPT), pairing.pair_id)
        await eventually(lambda: router.has_finished(1), within=2)
        await peers.assert_idle()


async def test_after_its_sender_is_gone_a_pairing_is_unknown() -> None:
    async with decode_worker(pages=PAGES) as peers, sender(peers) as (process, pair_id):
        await peers.session()
        process.signal(signal.SIGKILL)

        async def is_refused() -> bool:
            error = await asyncio.gather(peers.reserve(make_req(PROMPT), pair_id, transport="shm"), return_exceptions=True)
            return "pair again" in str(error[0])

        await eventually(is_refused, within=2)
        await peers.assert_idle()
