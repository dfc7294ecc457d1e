"""cuda_ipc between real processes on real GPUs: bit-exact, proved by its nonce, and safe when either side is killed.

Each test runs with both processes on one GPU, and with the decode worker's pool on another.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.handoff.cuda_ipc import NONCE_BYTES, PoolExport
from common.handoff.cuda_ipc_receiver import CudaIpcReceiver
from tests.helpers.cuda_writer import as_argument
from tests.helpers.decode_core import make_req
from tests.helpers.decode_worker import decode_worker
from tests.helpers.eventually import eventually
from tests.helpers.gpu_pool import NUM_PAGES, exported, fill, make_pool, words_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
KILLS = 20
KILLS_AT_ONCE = 5


@pytest.fixture(params=[1, 2], ids=["one-gpu", "two-gpus"])
def devices(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(the prefill worker's, the decode worker's)."""
    found = torch.cuda.device_count()
    if found < request.param:
        pytest.skip(f"needs {request.param} CUDA devices, there are {found}")
    return "cuda:0", f"cuda:{request.param - 1}"


class Child:
    """A process that answers lines with lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self, within: float = START_SECONDS) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), within)).decode().strip()

    async def order(self, text: str, *, within: float = 60) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        return await self.line(within)


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Child(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Owner:
    """A decode worker's side in this process: its pool and its receiver."""

    def __init__(self, device: str) -> None:
        self.pool = make_pool(device)
        self.export = exported(self.pool)
        self.gone: list[str] = []
        self.receiver = CudaIpcReceiver(
            self.export.pool_bytes, is_known="pair".__eq__, on_gone=self.gone.append, on_line=lambda pair_id, line: line.close()
        )


@asynccontextmanager
async def owner(device: str) -> AsyncIterator[Owner]:
    one = Owner(device)
    one.receiver.start()
    try:
        yield one
    finally:
        await one.receiver.close()


def sender_of(export: PoolExport, socket_name: str, pair_id: str, device: str) -> tuple[str, ...]:
    return ("tests.helpers.gpu_sender", as_argument(export), socket_name, pair_id, device)


async def test_pages_stored_by_kernels_of_another_process_are_bit_exact_and_no_other_is_touched(devices: tuple[str, str]) -> None:
    sender_device, device = devices
    async with owner(device) as one, child(*sender_of(one.export, one.receiver.socket_name, "pair", sender_device)) as sender:
        assert await sender.line() == "mapped"
        sources, dests = random.sample(range(NUM_PAGES), 40), random.sample(range(NUM_PAGES), 40)
        assert await sender.order(f"copy {','.join(map(str, sources))} {','.join(map(str, dests))}") == "copied"
        # Nothing but the message has told this process's GPU to look: the same as after a Commit.
        wanted = torch.zeros_like(words_of(one.pool))
        theirs = make_pool(device)
        fill(theirs)
        wanted[dests] = words_of(theirs)[sources]
        assert torch.equal(words_of(one.pool), wanted)
        assert await sender.order("close") == "closed"
        await eventually(lambda: one.gone == ["pair"], within=2)


async def test_another_nonce_is_refused_and_the_right_one_is_not(devices: tuple[str, str]) -> None:
    sender_device, device = devices
    async with owner(device) as one:
        wrong = replace(one.export, nonce=bytes(NONCE_BYTES))
        async with child(*sender_of(wrong, one.receiver.socket_name, "pair", sender_device)) as sender:
            assert "nonce differs" in await sender.line()
        await eventually(lambda: one.gone == ["pair"], within=5)
        async with child(*sender_of(one.export, one.receiver.socket_name, "pair", sender_device)) as sender:
            assert await sender.line() == "mapped"
            assert await sender.order("close") == "closed"


async def test_a_sender_killed_in_mid_store_frees_its_pages_once_nothing_can_write_any_more(devices: tuple[str, str]) -> None:
    sender_device, device = devices
    pool = make_pool(device)
    export = exported(pool)
    async with decode_worker(pages=NUM_PAGES, export=export) as peers:
        router = await peers.session()
        pairing = await peers.pair()
        async with child(*sender_of(export, pairing.cuda_pool.socket, pairing.pair_id, sender_device)) as sender:
            assert await sender.line() == "mapped"
            req = make_req(list(range(100)), uid=1)
            granted = await peers.reserve(req, pairing.pair_id, transport="cuda_ipc")
            assert await sender.order(f"store {','.join(map(str, granted.page_ids))}") == "storing"
            await router.cancel(1)

            async def quarantined() -> bool:
                counts = await peers.worker.check()
                return counts.quarantined == len(granted.page_ids)

            await eventually(quarantined, within=2)
            await asyncio.sleep(0.5)
            assert await quarantined()
            killed = time.monotonic()
            sender.process.send_signal(signal.SIGKILL)
            await peers.assert_idle(within=20)
            seconds = time.monotonic() - killed
            after = words_of(pool).clone()
            await asyncio.sleep(1)
            assert torch.equal(words_of(pool), after), "the sender still wrote after its pages were given back"
            print(f"{device}: pages came back {seconds * 1000:.0f} ms after the kill")


async def test_a_decode_worker_killed_in_mid_store_leaves_its_sender_working_or_dead_but_never_wrong(
    devices: tuple[str, str],
) -> None:
    """What the sender's context sees is written to the test's output. A few at a time: a round is mostly two processes' start."""
    sender_device, device = devices
    at_once = asyncio.Semaphore(KILLS_AT_ONCE)

    async def one() -> str:
        async with at_once:
            return await kill_in_mid_store(sender_device, device)

    for outcome, times in Counter(await asyncio.gather(*(one() for _ in range(KILLS)))).most_common():
        print(f"{sender_device} -> {device}, decode worker killed in mid-store: {times} x {outcome}")


async def kill_in_mid_store(sender_device: str, device: str) -> str:
    """What the sender's context saw of it."""
    async with child("tests.helpers.gpu_pool", device) as decode:
        told = json.loads(await decode.line())
        async with child(*sender_args(told, sender_device)) as sender:
            assert await sender.line() == "mapped"
            assert await sender.order(f"store {','.join(map(str, range(NUM_PAGES)))}") == "storing"
            await asyncio.sleep(random.uniform(0, 0.1))
            decode.process.send_signal(signal.SIGKILL)
            await decode.process.wait()
            await asyncio.sleep(0.5)
            outcome = await sender.order("check")
            if outcome == "alive":
                assert await sender.order("stop") == "stopped"
                return f"alive, then {await sender.order('close')}"
            assert outcome.startswith("error: ")
            assert await asyncio.wait_for(sender.process.wait(), 20) == 1
            return outcome


def sender_args(told: dict[str, str], device: str) -> tuple[str, ...]:
    return ("tests.helpers.gpu_sender", told["export"], told["socket"], told["pair_id"], device)
