"""cuda_ipc with a real second process as the sender: killed, stopped, hung up, and well-behaved. The GPUs are FakeCuda's."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest

from common.handoff.cuda_ipc import PoolExport
from common.rpc.gen.pdserve.v1 import decode_pb2
from common.worker_config import ENGINES
from tests.helpers.cuda_writer import as_argument
from tests.helpers.decode_core import PROMPT, make_req
from tests.helpers.decode_worker import Peers, commit_request, decode_worker
from tests.helpers.eventually import eventually
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_runner import continuation
from tests.helpers.sender_process import SenderProcess, pages_are, sender_process

PAGES = 8


class Sender(SenderProcess):
    """Its GPU has mapped the pool."""

    async def commit_ahead(self, req: Any, granted: Any) -> None:
        await self.order(f"send {commit_request(req, granted).SerializeToString().hex()}", answer="sent")


@asynccontextmanager
async def sender(peers: Peers, **export: Any) -> AsyncIterator[tuple[Sender, str]]:
    """And its pair id. export: what it is told wrong."""
    pairing = await peers.pair()
    told = pairing.cuda_pool
    fields = {name: getattr(told, name) for name in PoolExport.__dataclass_fields__} | export
    arguments = (as_argument(PoolExport(**fields)), told.socket, pairing.pair_id)
    async with sender_process("tests.helpers.cuda_writer", *arguments, kind=Sender) as process:
        yield process, pairing.pair_id


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_request_stored_through_the_mapping_decodes_right() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        req = make_req(PROMPT, output_len=6)
        granted = await peers.reserve(req, pair_id, transport="cuda_ipc")
        await process.fill(peers, req, granted)
        await peers.commit(req, granted)
        await eventually(lambda: router.has_finished(1), within=2)
        assert [token.token_id for token in router.tokens(1)] == continuation(PROMPT, 6)
        await peers.assert_idle()


async def test_flt_03_a_killed_senders_pages_come_back_when_its_process_has_exited() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        live = await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="cuda_ipc")
        ended = await peers.reserve(make_req([*PROMPT[:-1], 5], uid=2), pair_id, transport="cuda_ipc")
        await process.write_for_ever(peers, *live.page_ids, *ended.page_ids)
        await router.cancel(2)
        await eventually(lambda: pages_are(peers, held=4, quarantined=3), within=2)
        process.signal(signal.SIGKILL)
        await peers.assert_idle(within=2)  # Long before the lease of 10 s is over.
        failures = [message.failure for message in router.told if message.HasField("failure")]
        assert [(failure.uid, failure.retryable) for failure in failures] == [(1, True)]
        after = bytes(peers.worker.memory.view)
        await asyncio.sleep(0.1)
        assert bytes(peers.worker.memory.view) == after


async def test_hnd_09_eof_does_not_free_pages_while_the_process_that_mapped_them_lives() -> None:
    """What a killed process looks like whose files are closed before its GPU context is gone, drawn out."""
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        await peers.session()
        granted = await peers.reserve(make_req(PROMPT), pair_id, transport="cuda_ipc")
        await process.order("hang up", answer="hung up")
        await process.write_for_ever(peers, *granted.page_ids)
        await peers.release(granted.ticket, drained=False)
        await eventually(lambda: pages_are(peers, held=0, quarantined=3), within=2)
        refused = await error_of(peers.reserve(make_req(PROMPT, uid=2), pair_id, transport="cuda_ipc"))
        assert "pair again" in str(refused.details())
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        assert await pages_are(peers, held=0, quarantined=3)
        process.signal(signal.SIGKILL)
        await peers.assert_idle(within=2)


async def test_hnd_09_a_stopped_sender_keeps_its_pages_in_quarantine_until_it_releases_or_dies() -> None:
    lease = timedelta(milliseconds=200)
    async with decode_worker(pages=PAGES, lease=lease, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        granted = await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="cuda_ipc")
        await process.write_for_ever(peers, *granted.page_ids)
        process.signal(signal.SIGSTOP)
        await eventually(lambda: pages_are(peers, held=0, quarantined=3), within=2)
        await asyncio.sleep(0.5)  # Leases do not matter any more: only the sender's word does.
        assert await pages_are(peers, held=0, quarantined=3)
        process.signal(signal.SIGCONT)
        grpc_pair = (await peers.pair()).pair_id
        await peers.hand_over(make_req([1, 2, 3], uid=2, output_len=8), grpc_pair)
        await eventually(lambda: router.has_finished(2), within=2)
        assert [token.token_id for token in router.tokens(2)] == continuation([1, 2, 3], 8)
        assert await pages_are(peers, held=0, quarantined=3)
        await process.order("stop", answer="stopped")
        await peers.release(granted.ticket, drained=True)
        await peers.assert_idle()


async def test_a_sender_that_closes_in_good_order_frees_its_pages_and_may_go_on_by_grpc() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="cuda_ipc")
        await process.order("close", answer="closed")
        await peers.assert_idle(within=2)
        await peers.hand_over(make_req(PROMPT, uid=2), pair_id)
        await eventually(lambda: router.has_finished(2), within=2)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_commit_that_comes_ahead_starts_decoding_and_the_one_that_follows_is_answered(engine: str) -> None:
    """Sent from engine to engine; where they are processes no event loop has a hand in it."""
    async with decode_worker(pages=PAGES, cuda=FakeCuda(), engine=engine) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        req = make_req(PROMPT, output_len=6)
        granted = await peers.reserve(req, pair_id, transport="cuda_ipc")
        await process.fill(peers, req, granted)
        await process.commit_ahead(req, granted)
        await eventually(lambda: router.has_finished(1), within=2)
        renewed = await peers.decode.Renew(decode_pb2.RenewRequest(tickets=[granted.ticket]), timeout=5)
        assert list(renewed.lost) == [], "its sender is not to think it lost before its own Commit was answered"
        await peers.commit(req, granted)
        await process.commit_ahead(req, granted)
        await peers.commit(req, granted)
        assert [token.token_id for token in router.tokens(1)] == continuation(PROMPT, 6)
        await peers.assert_idle()


async def test_a_commit_that_comes_ahead_but_late_changes_nothing() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        first, second = make_req(PROMPT, uid=1, output_len=6), make_req([7, 7, 7], uid=2, output_len=6)
        granted = await peers.reserve(first, pair_id, transport="cuda_ipc")
        await process.fill(peers, first, granted)
        await peers.commit(first, granted)
        await process.commit_ahead(first, granted)
        cancelled = await peers.reserve(second, pair_id, transport="cuda_ipc")
        await router.cancel(2)
        await eventually(lambda: pages_are(peers, held=0, quarantined=len(cancelled.page_ids)), within=2)
        await process.commit_ahead(second, cancelled)
        assert (await error_of(peers.commit(second, cancelled))).code() is grpc.StatusCode.ABORTED
        await peers.release(cancelled.ticket)
        await eventually(lambda: router.has_finished(1), within=2)
        assert [token.token_id for token in router.tokens(1)] == continuation(PROMPT, 6)
        assert router.tokens(2) == []
        await peers.assert_idle()


async def test_a_cancel_between_the_two_commits_drops_the_request_once() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        req = make_req(PROMPT, output_len=20)
        granted = await peers.reserve(req, pair_id, transport="cuda_ipc")
        await process.fill(peers, req, granted)
        await process.commit_ahead(req, granted)
        await eventually(lambda: len(router.tokens(1)) > 0, within=2)
        await router.cancel(1)
        await peers.commit(req, granted)
        await peers.release(granted.ticket)
        await peers.assert_idle()


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_message_ahead_that_is_no_commit_or_of_a_ticket_sent_by_grpc_is_ignored(engine: str) -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda(), engine=engine) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        req = make_req(PROMPT, output_len=6)
        granted = await peers.reserve(req, pair_id)
        await process.order(f"send {(bytes([255]) * 9).hex()}", answer="sent")
        await process.commit_ahead(req, granted)  # Its bytes are missing.
        await peers.push(granted.ticket, peers.page_bytes_of(req, granted))
        await peers.commit(req, granted)
        await eventually(lambda: router.has_finished(1), within=2)
        assert [token.token_id for token in router.tokens(1)] == continuation(PROMPT, 6)
        await peers.assert_idle()


async def test_a_commit_ahead_of_another_pairing_s_ticket_is_ignored() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers, sender(peers) as (one, pair_id), sender(peers) as (other, _):
        router = await peers.session()
        req = make_req(PROMPT, output_len=6)
        granted = await peers.reserve(req, pair_id, transport="cuda_ipc")
        await other.commit_ahead(req, granted)  # Its pages are empty: FakeRunner would see it.
        await one.fill(peers, req, granted)
        await one.commit_ahead(req, granted)
        await eventually(lambda: router.has_finished(1), within=2)
        await peers.commit(req, granted)
        assert [token.token_id for token in router.tokens(1)] == continuation(PROMPT, 6)
        await peers.assert_idle()


async def test_without_the_connection_a_reserve_is_refused_and_grpc_is_not() -> None:
    async with decode_worker(pages=PAGES, cuda=FakeCuda()) as peers:
        router, pairing = await peers.session(), await peers.pair()
        assert pairing.HasField("cuda_pool") and pairing.shm_socket == ""
        refused = await error_of(peers.reserve(make_req(PROMPT), pairing.pair_id, transport="cuda_ipc"))
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION and "pair again" in str(refused.details())
        await peers.hand_over(make_req(PROMPT), pairing.pair_id)
        await eventually(lambda: router.has_finished(1), within=2)
        await peers.assert_idle()


async def test_a_worker_on_a_cpu_offers_no_pool_in_gpu_memory() -> None:
    async with decode_worker(pages=PAGES) as peers:
        assert not (await peers.pair()).HasField("cuda_pool")
