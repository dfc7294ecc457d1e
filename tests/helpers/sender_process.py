"""A sender in a process of its own, so that it can be killed and stopped: tests/helpers/shm_writer.py, cuda_writer.py."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from common.core import Req
from common.rpc.gen.pdserve.v1 import decode_pb2
from tests.helpers.decode_worker import Peers
from tests.helpers.eventually import SLACK

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 5.0


class SenderProcess:
    """Takes orders by line and answers each."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def order(self, text: str, *, answer: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        await self.wait_for(answer)

    async def wait_for(self, answer: str) -> None:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), SLACK * ANSWER_SECONDS)
        assert line.decode().strip() == answer

    async def fill(self, peers: Peers, req: Req, granted: decode_pb2.ReserveResponse) -> None:
        for page, data in zip(granted.page_ids, peers.page_bytes_of(req, granted), strict=True):
            await self.order(f"fill {len(data)} {page} {data.hex()}", answer="filled")

    async def write_for_ever(self, peers: Peers, *pages: int) -> None:
        await self.order(f"pages {peers.worker.memory.page_bytes} {' '.join(map(str, pages))}", answer="writing")

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)


S = TypeVar("S", bound=SenderProcess)


@asynccontextmanager
async def sender_process(module: str, *arguments: str, kind: type[S]) -> AsyncIterator[S]:
    """Has mapped the pool."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    sender = kind(process)
    try:
        await sender.wait_for("mapped")
        yield sender
    finally:
        with suppress(ProcessLookupError):  # Killed by the test, perhaps.
            process.kill()
        await process.wait()


async def pages_are(peers: Peers, *, held: int, quarantined: int) -> bool:
    counts = await peers.worker.check()
    return (counts.held, counts.quarantined) == (held, quarantined)
