"""A whole prefill worker that stores into a whole decode worker's pool (cuda_ipc). Their GPUs are FakeCuda's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from common.errors import Unavailable
from common.handoff.cuda_driver import is_cuda_fault
from common.work import FinishReason
from decode_worker.worker import DecodeWorker
from tests.helpers.decode_worker import Peers, Router, decode_worker
from tests.helpers.eventually import eventually
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_decode import FakeDecode
from tests.helpers.fake_runner import EOS, continuation
from tests.helpers.prefill_core import EPOCH
from tests.helpers.prefill_stand import PrefillStand

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("each_lookahead")]
PROMPT = list(range(30, 51))  # Five pages of four tokens and one token more.


class Target(FakeDecode):
    """What a PrefillStand needs to know of a real decode worker. A test's end checks that worker itself."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(page_size=4)
        self.worker_id, self.address = peers.worker.worker_id, str(peers.address)


class Pair:
    def __init__(self, peers: Peers, router: Router, stand: PrefillStand, cuda: FakeCuda) -> None:
        self.peers, self.router, self.stand, self.cuda = peers, router, stand, cuda

    async def generate(self, ids: Sequence[int], *, uid: int, output_len: int = 6, **fields: Any) -> list[int]:
        """The decode worker's tokens of completion uid."""
        journey = self.stand.submit(ids, uid=uid, output_len=output_len, **fields)
        await self.stand.finish(journey)
        assert self.stand.report.all("failed") == []
        await eventually(lambda: self.router.has_finished(uid), within=3)
        return [token.token_id for token in self.router.tokens(uid)]


@asynccontextmanager
async def pair(*, pages: int = 32, prefill_cuda: FakeCuda | None = None, **settings: Any) -> AsyncIterator[Pair]:
    """A prefill and a decode worker, both on GPUs; nothing may be left at the end."""
    cuda = prefill_cuda or FakeCuda()
    async with decode_worker(pages=pages, cuda=FakeCuda()) as peers:
        router = await peers.session(EPOCH)
        async with PrefillStand(Target(peers), cuda=cuda, **settings) as stand:
            yield Pair(peers, router, stand, cuda)
            await eventually(lambda: len(stand.worker.journeys) == 0, within=3)
            await peers.assert_idle()
        assert cuda.is_lost or cuda.num_mapped == 0, "a pool is still mapped"


def transports(worked: Pair) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in worked.stand.registry.collect():
        found |= {s.labels["transport"]: s.value for s in metric.samples if s.name == "pdserve_handoffs_total"}
    return {name: value for name, value in found.items() if value}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 8, 21])
async def test_prompts_of_any_length_in_chunks_that_fit_no_page_arrive_bit_exact(length: int, verify: bool) -> None:
    async with pair(chunk_tokens=3, verify=verify) as both:
        prompt = PROMPT[:length]
        assert await both.generate(prompt, uid=1) == continuation(prompt, 6)  # FakeRunner reads back all KV of every step.
        assert transports(both) == {"cuda_ipc": 1}
        assert both.stand.copied == []


async def test_what_only_the_prefill_worker_has_cached_is_copied_in_bulk_and_what_both_have_is_not_sent() -> None:
    async with pair(chunk_tokens=3) as both:
        await both.generate(PROMPT, uid=1)
        assert await both.generate([*PROMPT[:16], 7, 7, 7], uid=2) == continuation([*PROMPT[:16], 7, 7, 7], 6)
        assert both.stand.copied == []
        await both.peers.worker.flush_prefix_cache()
        prompt = [*PROMPT[:12], 9, 9, 9, 9, 9]
        assert await both.generate(prompt, uid=3) == continuation(prompt, 6)
        assert len(both.stand.copied) == 3
        assert transports(both) == {"cuda_ipc": 3}


async def test_a_prefix_that_the_decode_worker_has_and_the_prefill_worker_lacks_is_not_stored_again() -> None:
    async with pair(chunk_tokens=5) as both:
        await both.generate(PROMPT, uid=1)
        await both.stand.worker.flush_prefix_cache()
        assert await both.generate([*PROMPT, 3, 4], uid=2) == continuation([*PROMPT, 3, 4], 6)
        assert both.stand.copied == []


async def test_several_completions_of_one_prompt_share_what_was_stored() -> None:
    async with pair() as both:
        assert await both.generate(PROMPT, uid=1, n=3) == continuation(PROMPT, 6)
        for offset in (1, 2):
            await eventually(partial(both.router.has_finished, 1 + offset), within=3)
            tokens = [token.token_id for token in both.router.tokens(1 + offset)]
            assert tokens == continuation(PROMPT, 6, completion=offset)


async def test_decoding_starts_by_the_commit_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one by gRPC is held back until all tokens are there."""
    async with pair() as both:
        answered, commit = asyncio.Event(), DecodeWorker.commit

        async def held_back(worker: DecodeWorker, command: Any) -> None:
            await answered.wait()
            await commit(worker, command)

        monkeypatch.setattr(DecodeWorker, "commit", held_back)
        journey = both.stand.submit(PROMPT, uid=1, output_len=6, logprobs=2)
        await eventually(lambda: both.router.has_finished(1), within=3)
        assert both.stand.report.kinds == ["started", "first_token"]
        assert len(both.router.tokens(1)[0].top_ids) == 2
        answered.set()
        await both.stand.finish(journey)
        assert both.stand.report.kinds[-1] == "handed_off"
        assert [token.token_id for token in both.router.tokens(1)] == continuation(PROMPT, 6)


async def test_a_request_whose_first_token_is_its_last_is_not_committed_ahead() -> None:
    async with pair(next_token=lambda history, completion: EOS) as both:
        await both.stand.finish(both.stand.submit(PROMPT, uid=1, output_len=6))
        (token,) = both.stand.report.all("first_token")
        assert token.finish is FinishReason.STOP
        await both.peers.assert_idle()
        assert both.router.tokens(1) == []


async def test_a_wrong_checksum_ends_the_request_and_not_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.cuda_pools.page_checksum", lambda data: 1)
    async with pair(verify=True) as both:
        await both.stand.finish(both.stand.submit(PROMPT, uid=1, output_len=6))
        assert "checksum" in both.stand.report.failure.message
        assert both.router.tokens(1) == []


@pytest.mark.parametrize("call", ["open_ipc", "read", "check_access"])
async def test_a_pool_that_cannot_be_mapped_is_sent_to_by_grpc_and_the_log_says_why(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    cuda.fails = {call}
    with caplog.at_level("INFO"):
        async with pair(prefill_cuda=cuda) as both:
            assert await both.generate(PROMPT, uid=1) == continuation(PROMPT, 6)
            assert await both.generate(PROMPT[:9], uid=2) == continuation(PROMPT[:9], 6)
            assert transports(both) == {"grpc": 2}
    reason = f"trying the next transport: the decode worker's GPU memory cannot be mapped: {call}"
    assert any(reason in message for message in caplog.messages)


async def test_a_mode_that_insists_on_a_pool_that_cannot_be_mapped_fails_the_request() -> None:
    cuda = FakeCuda()
    cuda.fails = {"open_ipc"}
    async with pair(prefill_cuda=cuda, transport="cuda_ipc") as both:
        await both.stand.finish(both.stand.submit(PROMPT, uid=1))
        failure = both.stand.report.failure
        assert "--transport cuda_ipc is impossible with this decode worker" in failure.message and not failure.retryable


async def test_a_prefill_worker_on_a_cpu_sends_to_a_gpu_by_grpc() -> None:
    async with decode_worker(cuda=FakeCuda()) as peers:
        router = await peers.session(EPOCH)
        async with PrefillStand(Target(peers)) as stand:
            await stand.finish(stand.submit(PROMPT, uid=1, output_len=6))
            await eventually(lambda: router.has_finished(1), within=3)
        await peers.assert_idle()


async def test_a_cancel_while_chunks_are_computed_waits_for_the_kernels_before_it_says_drained() -> None:
    started, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(batch: Any) -> None:
        loop.call_soon_threadsafe(started.set)
        assert go.wait(timeout=10)

    async with pair(chunk_tokens=4, before_run=hold) as both:
        journey = both.stand.submit(PROMPT * 4, uid=1, output_len=6)
        await started.wait()
        both.cuda.calls.clear()
        journey.end(Unavailable("cancelled by the test"))
        # The engine is asked to forget the request in the same turn of the loop: the chunk under way is the last one.
        await eventually(lambda: both.stand.report.all("failed"), within=3)
        assert not journey.task.done() and (await both.peers.worker.check()).held > 0
        go.set()
        await both.stand.finish(journey)
        assert "synchronize" in both.cuda.calls
        await both.peers.assert_idle()


async def test_a_decode_worker_that_ends_ends_the_requests_that_store_into_it_at_once() -> None:
    async with decode_worker(cuda=FakeCuda(), pages=32) as peers:
        await peers.session(EPOCH)
        hold = asyncio.Event()
        async with PrefillStand(Target(peers), cuda=FakeCuda()) as stand:

            async def held_back(command: Any) -> None:
                await hold.wait()

            peers.worker.commit = held_back  # type: ignore[method-assign]
            peers.worker._engine.listen = lambda connection, to_command: connection.close()  # type: ignore[method-assign]
            journey = stand.submit(PROMPT, uid=1, output_len=6)
            await eventually(lambda: "first_token" in stand.report.kinds, within=3)
            assert peers.worker.senders._cuda_ipc is not None
            await peers.worker.senders._cuda_ipc.close()
            await stand.finish(journey, within=2)
            assert stand.report.failure.retryable and "ended with that worker" in stand.report.failure.message
            hold.set()


async def test_flt_a_lost_cuda_context_ends_the_engine_and_its_pages_stay_withheld_meanwhile() -> None:
    cuda = FakeCuda()
    async with decode_worker(cuda=FakeCuda(), pages=32) as peers:
        await peers.session(EPOCH)

        def lose(batch: Any) -> None:
            cuda.is_lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        async with PrefillStand(Target(peers), cuda=cuda, before_run=lose) as stand:
            journey = stand.submit(PROMPT, uid=1, output_len=6)
            error = await asyncio.wait_for(asyncio.shield(stand.engine.died), 3)
            assert error is not None and is_cuda_fault(error) and "illegal memory access" in str(error.__context__)
            journey.end(Unavailable("this prefill worker has ended"))
            await stand.finish(journey)

            async def is_withheld() -> bool:
                counts = await peers.worker.check()
                return (counts.held, counts.quarantined) == (0, 6)

            # No goodbye was said and nothing called drained: this process, which lives, might still write.
            await eventually(is_withheld, within=2)
