"""A decode worker over real gRPC: the router's session, the prefill worker's Reserve, Push and Commit, and their ends."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import grpc
import pytest

from common.errors import LEAVING_METADATA, Leaving
from common.handoff.base import page_checksum
from common.rpc.channels import error_of
from common.rpc.gen.pdserve.v1 import decode_pb2, handoff_pb2, prefill_pb2
from common.work import FinishReason
from common.worker_wire import compatibility_to_pb
from decode_worker import servicer
from decode_worker.traces import Traces
from tests.helpers.decode_core import EPOCH, make_req
from tests.helpers.decode_worker import decode_worker
from tests.helpers.eventually import eventually
from tests.helpers.fake_runner import continuation
from tests.helpers.stages import Stages

PROMPT = list(range(10, 20))


def status(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[str, str]:
    return error.value.code().name, error.value.details() or ""


async def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return status(error)


async def test_a_request_goes_from_reserve_to_its_last_token() -> None:
    async with decode_worker() as peers:
        router, pairing = await peers.session(), await peers.pair()
        assert (pairing.decode_worker, pairing.page_bytes, pairing.pool_pages) == ("decode-test", 32, 32)
        req = make_req(PROMPT, output_len=6, n=2, logprobs=1)
        await peers.hand_over(req, pairing.pair_id)
        await eventually(lambda: router.has_finished(1) and router.has_finished(2), within=2)
        for i in range(2):
            tokens = router.tokens(1 + i)
            assert [(token.index, token.token_id) for token in tokens] == list(enumerate(continuation(PROMPT, 6, i)))
            assert [token.finish for token in tokens] == [0] * 5 + [FinishReason.LENGTH]
            assert all(len(token.top_ids) == 1 for token in tokens[1:])
        await peers.assert_idle()


async def test_hnd_15_many_at_once_lose_and_double_no_token_in_a_pool_that_is_too_small() -> None:
    async with decode_worker(pages=16) as peers:
        router, pairing = await peers.session(), await peers.pair()
        streamed: dict[int, list[int]] = {uid: [] for uid in range(1, 21)}
        read = 0

        async def one(uid: int) -> None:
            prompt, attempt, tokens = [uid, *PROMPT[1:]], 0, streamed[uid]
            while len(tokens) < 21:  # The last one, if it is alone, is the prefill worker's.
                attempt += 1
                req = make_req([*prompt, *tokens], uid=uid, attempt=attempt, prompt_len=10, output_len=22 - len(tokens))
                tokens.append(continuation(req.input_ids.tolist(), 1)[0])
                await peers.hand_over(req, pairing.pair_id)
                await eventually(lambda: router.has_finished(uid) or retracted(uid, attempt), within=10)  # noqa: B023
                await asyncio.sleep(0)
                collect()

        def retracted(uid: int, attempt: int) -> bool:
            return any((m.retracted.uid, m.retracted.attempt) == (uid, attempt) for m in router.told if m.HasField("retracted"))

        def collect() -> None:
            nonlocal read
            for message in router.told[read:]:
                for token in message.step.tokens:
                    tokens = streamed[token.uid]
                    assert token.index <= len(tokens)
                    if token.index == len(tokens):
                        tokens.append(token.token_id)
            read = len(router.told)

        await asyncio.gather(*(one(uid) for uid in streamed))
        for uid, tokens in streamed.items():
            assert tokens == continuation([uid, *PROMPT[1:]], 22)[: len(tokens)]
        assert any(message.HasField("retracted") for message in router.told), "the pool was never short"
        await peers.assert_idle()


async def test_reserve_waits_for_room_and_is_taken_back_when_its_caller_leaves() -> None:
    async with decode_worker(pages=4) as peers:
        await peers.session()
        pairing = await peers.pair()
        granted = await peers.reserve(make_req(PROMPT, uid=1), pairing.pair_id)
        impatient = peers.reserve(make_req(PROMPT, uid=2), pairing.pair_id)
        patient = peers.reserve(make_req(PROMPT, uid=3), pairing.pair_id)
        await eventually(lambda: peers.worker.load().waiting == 3, within=2)
        impatient.cancel()
        await eventually(lambda: peers.worker.load().waiting == 2, within=2)
        await peers.release(granted.ticket)
        assert (await patient).page_ids
        patient_ticket = (await patient).ticket
        await peers.release(patient_ticket)
        await peers.assert_idle()


async def test_a_reserve_without_session_pairing_or_known_transport_is_refused() -> None:
    async with decode_worker() as peers:
        pairing = await peers.pair()
        assert await refused(peers.reserve(make_req(PROMPT), pairing.pair_id)) == (
            "UNAVAILABLE",
            f"this decode worker has no session with router {EPOCH:016x}",
        )
        await peers.session()
        assert (await refused(peers.reserve(make_req(PROMPT), "unknown")))[0] == "FAILED_PRECONDITION"
        assert (await refused(peers.reserve(make_req(PROMPT), pairing.pair_id, transport="shm")))[0] == "FAILED_PRECONDITION"
        assert (await refused(peers.reserve(make_req(PROMPT), pairing.pair_id, transport="pigeon")))[0] == "INVALID_ARGUMENT"
        assert (await refused(peers.reserve(make_req(range(127), output_len=9), pairing.pair_id)))[0] == "OUT_OF_RANGE"
        bare = decode_pb2.ReserveRequest(pair_id=pairing.pair_id, transport="grpc")
        assert (await refused(peers.decode.Reserve(bare)))[0] == "INVALID_ARGUMENT"
        await peers.assert_idle()


async def test_cmp_01_a_pair_that_differs_is_refused_naming_both_values() -> None:
    async with decode_worker() as peers:
        request = decode_pb2.PairRequest(prefill_worker="prefill-a")
        request.compatibility.CopyFrom(compatibility_to_pb(peers.runner.compatibility))
        request.compatibility.page_size = 16
        code, text = await refused(peers.decode.Pair(request))
        assert code == "FAILED_PRECONDITION"
        assert text == "page_size differs: 16 on prefill-a, 4 on decode-test"


async def test_commit_is_refused_while_bytes_are_missing() -> None:
    async with decode_worker() as peers:
        router, pairing = await peers.session(), await peers.pair()
        req = make_req(PROMPT)
        granted = await peers.reserve(req, pairing.pair_id)
        code, text = await refused(peers.commit(req, granted))
        assert (code, text) == ("FAILED_PRECONDITION", "bytes are missing: 0 of 96 have arrived")
        assert (await refused(peers.push(granted.ticket, peers.page_bytes_of(req, granted)[:2])))[0] == "FAILED_PRECONDITION"
        await peers.release(granted.ticket)
        assert (await refused(peers.commit(req, granted)))[0] == "ABORTED"
        assert router.told == []
        await peers.assert_idle()


async def test_checksums_are_compared_on_request() -> None:
    async with decode_worker() as peers:
        peers.worker.traces = Traces(stages := Stages())
        router, pairing = await peers.session(), await peers.pair()
        # An engine with nothing left ends what is open, too, and may say so first.
        other = await peers.reserve(make_req([1, 2, 3], uid=3), pairing.pair_id)
        good, bad = make_req(PROMPT, uid=1), make_req(range(50, 60), uid=2)
        for req in (good, bad):
            granted = await peers.reserve(req, pairing.pair_id, verify=True)
            pages = peers.page_bytes_of(req, granted)
            await peers.push(granted.ticket, pages)
            crcs = [page_checksum(page) ^ (req is bad) for page in pages]
            if req is good:
                await peers.commit(req, granted, crcs=crcs)
            else:
                assert (await refused(peers.commit(req, granted, crcs=crcs)))[0] == "DATA_LOSS"
        await eventually(lambda: router.has_finished(1), within=2)
        assert router.tokens(2) == []
        assert ("receive", "page 0 of ticket's 3: checksum") in [(name, why[:30]) for name, why in stages.told]
        await peers.release(other.ticket)
        await peers.assert_idle()


async def test_an_ended_ticket_closes_its_push_stream_at_once() -> None:
    async with decode_worker() as peers:
        router, pairing = await peers.session(), await peers.pair()
        req = make_req(PROMPT)
        granted = await peers.reserve(req, pairing.pair_id)
        call = peers.handoff.Push()
        page = peers.page_bytes_of(req, granted)[0]
        await call.write(handoff_pb2.KvFrame(ticket=granted.ticket, data=page, crc32=page_checksum(page)))
        await asyncio.sleep(0.05)
        await router.cancel(1)
        code, text = await refused(asyncio.wait_for(_await(call), 2))
        assert (code, text) == ("ABORTED", f"the ticket has ended: work {req.key} was cancelled")
        await peers.assert_idle()


async def _await(call: Any) -> Any:
    return await call


async def test_the_hostile_push_gets_a_status_and_writes_nothing() -> None:
    async with decode_worker() as peers:
        await peers.session()
        pairing = await peers.pair()
        granted = await peers.reserve(make_req(PROMPT), pairing.pair_id)
        before = bytes(peers.worker.memory.view)
        data = b"x" * 8
        for ticket, index, offset, crc32, code in [
            ("guess", 0, 0, page_checksum(data), "NOT_FOUND"),
            (granted.ticket, 3, 0, page_checksum(data), "INVALID_ARGUMENT"),
        ]:
            frame = handoff_pb2.KvFrame(ticket=ticket, page_index=index, offset=offset, data=data, crc32=crc32)
            assert (await refused(peers.handoff.Push(iter([frame]), timeout=5)))[0] == code
        assert bytes(peers.worker.memory.view) == before
        await peers.release(granted.ticket)
        await peers.assert_idle()


async def test_flt_11_a_router_that_breaks_off_leaves_nothing_behind() -> None:
    async with decode_worker(pages=8, before_run=lambda batch: time.sleep(0.02)) as peers:
        router, pairing = await peers.session(), await peers.pair()
        await peers.hand_over(make_req([1], uid=1, output_len=28), pairing.pair_id)
        await peers.reserve(make_req(PROMPT, uid=2), pairing.pair_id)
        in_line = peers.reserve(make_req(range(30, 42), uid=3), pairing.pair_id)
        await eventually(lambda: peers.worker.load().waiting == 2, within=2)
        router.call.cancel()
        assert (await refused(in_line))[0] == "ABORTED"
        await peers.assert_idle()


async def test_a_router_that_comes_back_has_its_old_work_dropped_and_goes_on() -> None:
    async with decode_worker() as peers:
        first, pairing = await peers.session(), await peers.pair()
        await peers.hand_over(make_req(PROMPT, uid=1, output_len=100), pairing.pair_id)
        second = await peers.session()
        await eventually(first.call.done, within=2)
        assert await first.call.code() is grpc.StatusCode.ABORTED
        await peers.hand_over(make_req(PROMPT, uid=2), pairing.pair_id)
        await eventually(lambda: second.has_finished(2), within=2)
        await peers.assert_idle()


async def test_a_session_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "HELLO_SECONDS", 0.1)
    async with decode_worker() as peers:
        call = peers.decode.Session(timeout=3)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert status(error) == ("DEADLINE_EXCEEDED", "no hello within 0.1 s")


async def test_a_session_begins_with_hello_and_takes_only_cancels_after() -> None:
    async with decode_worker() as peers:
        cancel = decode_pb2.DecodeSessionRequest(cancel=prefill_pb2.CancelWork(uid=1, attempt=1))
        silent = peers.decode.Session()
        await silent.write(cancel)
        assert await silent.code() is grpc.StatusCode.INVALID_ARGUMENT
        router = await peers.session()
        await router.call.write(decode_pb2.DecodeSessionRequest.FromString(b"\x9a\x06\x00"))  # Field 99: of a newer router.
        await router.call.write(decode_pb2.DecodeSessionRequest(inquire=decode_pb2.Inquire(uid=1, attempt=1)))
        await eventually(lambda: len(router.told) > 0, within=2)
        await router.call.write(decode_pb2.DecodeSessionRequest(hello=prefill_pb2.SessionHello(router_epoch=EPOCH)))
        assert await router.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await peers.assert_idle()


async def test_hnd_07_leases_end_while_nothing_else_happens_and_renewing_keeps_them() -> None:
    async with decode_worker(lease=timedelta(milliseconds=300)) as peers:
        router, pairing = await peers.session(), await peers.pair()
        kept = await peers.reserve(make_req(PROMPT, uid=1), pairing.pair_id)
        lost = await peers.reserve(make_req(PROMPT, uid=2), pairing.pair_id)
        assert kept.lease_ms == 300
        for _ in range(6):
            await asyncio.sleep(0.1)
            renewed = await peers.decode.Renew(decode_pb2.RenewRequest(tickets=[kept.ticket]))
            assert list(renewed.lost) == []
        failures = [message.failure for message in router.told if message.HasField("failure")]
        assert [(failure.uid, failure.retryable) for failure in failures] == [(2, True)]
        both = await peers.decode.Renew(decode_pb2.RenewRequest(tickets=[kept.ticket, lost.ticket]))
        assert list(both.lost) == [lost.ticket]
        await peers.assert_idle(within=3)


async def test_leaving_finishes_what_it_can_and_hands_the_rest_back() -> None:
    async with decode_worker(before_run=lambda batch: time.sleep(0.02)) as peers:
        router, pairing = await peers.session(), await peers.pair()
        await peers.hand_over(make_req(PROMPT, uid=1, output_len=4), pairing.pair_id)
        await peers.hand_over(make_req(PROMPT, uid=2, output_len=100), pairing.pair_id)
        draining = asyncio.create_task(peers.worker.drain(timedelta(milliseconds=400)))
        await eventually(lambda: peers.worker.load().draining, within=1)
        await draining
        await peers.worker.say_goodbye()
        await eventually(router.call.done, within=2)
        assert router.has_finished(1)
        assert [message.retracted.uid for message in router.told if message.HasField("retracted")] == [2]
        indices = [token.index for token in router.tokens(2)]
        assert indices == list(range(len(indices)))
        assert await router.call.code() is grpc.StatusCode.UNAVAILABLE
        assert LEAVING_METADATA in tuple(await router.call.trailing_metadata() or ())
        await peers.assert_idle()


async def test_a_worker_that_drains_refuses_as_one_that_leaves_and_can_be_undrained() -> None:
    async with decode_worker(before_run=lambda batch: time.sleep(0.01)) as peers:
        router, pairing = await peers.session(), await peers.pair()
        receiving = await peers.reserve(make_req(PROMPT, uid=1), pairing.pair_id)
        await peers.worker.drain(timedelta(milliseconds=100))
        await eventually(lambda: router.told, within=1)
        assert [message.failure.handed_back for message in router.told] == [True], "a prompt on its way goes back too"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await peers.reserve(make_req(PROMPT, uid=2), pairing.pair_id)
        assert isinstance(error_of(refused.value), Leaving)

        await peers.decode.Release(decode_pb2.ReleaseRequest(ticket=receiving.ticket, drained=True))
        peers.worker.undrain()
        assert not peers.worker.load().draining
        await peers.hand_over(make_req(PROMPT, uid=3, output_len=4), pairing.pair_id)
        await eventually(lambda: router.has_finished(3), within=2)
        await peers.assert_idle()


async def test_the_flush_call_says_how_many_pages_it_dropped() -> None:
    async with decode_worker() as peers:
        router, pairing = await peers.session(), await peers.pair()
        await peers.hand_over(make_req(PROMPT), pairing.pair_id)
        await eventually(lambda: router.has_finished(1), within=2)
        flushed = await peers.decode.FlushPrefixCache(prefill_pb2.FlushPrefixCacheRequest())
        assert flushed.pages_freed == 3
        await peers.assert_idle()
