"""Shared memory with a real second process as the sender: killed, stopped and well-behaved."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

from common.work import PageCounts
from tests.helpers.decode_core import make_req
from tests.helpers.decode_worker import Peers, decode_worker, memory_of
from tests.helpers.eventually import eventually
from tests.helpers.fake_runner import continuation

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(10, 20))
PAGES = 8


class Sender:
    """tests/helpers/shm_writer.py in its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def order(self, text: str, *, answer: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        await self.wait_for(answer)

    async def wait_for(self, answer: str) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 10)
        assert line.decode().strip() == answer

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def sender(peers: Peers) -> AsyncIterator[tuple[Sender, str]]:
    """A process that has mapped the pool, and its pair id."""
    pairing = await peers.pair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.helpers.shm_writer", pairing.shm_socket, pairing.pair_id,
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    one = Sender(process)
    try:
        await one.wait_for("mapped")
        yield one, pairing.pair_id
    finally:
        with suppress(ProcessLookupError):  # Killed by the test, perhaps.
            process.kill()
        await process.wait()


async def pages_are(peers: Peers, *, held: int, quarantined: int) -> bool:
    counts: PageCounts = await peers.worker.check()
    return (counts.held, counts.quarantined) == (held, quarantined)


async def test_a_request_sent_through_shared_memory_decodes_right() -> None:
    async with decode_worker(pages=PAGES) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        req = make_req(PROMPT, output_len=6)
        granted = await peers.reserve(req, pair_id, transport="shm")
        for page, data in zip(granted.page_ids, peers.page_bytes_of(req, granted), strict=True):
            await process.order(f"fill {len(data)} {page} {data.hex()}", answer="filled")
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
        await process.order(" ".join(map(str, ["pages", memory_of(peers.worker).page_bytes, *pages])), answer="writing")
        await router.cancel(2)
        await eventually(lambda: pages_are(peers, held=4, quarantined=3), within=2)
        process.signal(signal.SIGKILL)
        await peers.assert_idle(within=2)  # Long before the lease of 10 s is over.
        failures = [message.failure for message in router.told if message.HasField("failure")]
        assert [(failure.uid, failure.retryable) for failure in failures] == [(1, True)]
        after = bytes(memory_of(peers.worker).view)
        await asyncio.sleep(0.1)
        assert bytes(memory_of(peers.worker).view) == after


async def test_hnd_09_a_stopped_sender_keeps_its_pages_in_quarantine_until_it_resumes_and_releases() -> None:
    async with decode_worker(pages=PAGES, lease=timedelta(milliseconds=200)) as peers, sender(peers) as (process, pair_id):
        router = await peers.session()
        granted = await peers.reserve(make_req(PROMPT, uid=1), pair_id, transport="shm")
        await process.order(
            " ".join(map(str, ["pages", memory_of(peers.worker).page_bytes, *granted.page_ids])), answer="writing"
        )
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
        await process.order(
            " ".join(map(str, ["pages", memory_of(peers.worker).page_bytes, *granted.page_ids])), answer="writing"
        )
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
