"""Handing prompts over page by page: what a prefill engine in its own process stores into a pool, compared byte by byte."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from common.engine.handle import Build
from common.engine.kv_pool import KVPool
from common.engine.process import ProcessEngine
from common.handoff.base import tokens_of
from common.handoff.cuda_ipc import PoolExport
from common.handoff.cuda_ipc_receiver import CudaIpcReceiver
from common.rpc.gen.pdserve.v1 import decode_pb2
from prefill_worker import commands
from tests.helpers.prefill_core import make_req

COMMIT_SECONDS = 60.0
LEASE_SECONDS = 120.0


@dataclass(frozen=True)
class Prompt:
    """held: leading tokens that the decode worker has, whole pages."""

    ids: Sequence[int]
    held: int = 0


class Handoffs:
    """One pair: this process has the decode worker's pool, a child the prefill engine (a PageKeeper)."""

    def __init__(self, engine: ProcessEngine, pool: KVPool, line: socket.socket) -> None:
        self._engine = engine
        self._pool = pool
        self._line = line
        self._bytes = pool.tensor.view(torch.uint8)
        self._uid = 0

    async def flush_prefix_cache(self) -> None:
        """The prefill engine's."""
        await self._engine.call(commands.FlushPrefixCache())

    async def check(self, *prompts: Prompt) -> None:
        """Hands these over together, to random pages of a pool full of noise. Whatever is not a token that was to be sent must be
        as it was. Nothing but the commits tells this process when to look."""
        self._bytes.random_(0, 256)
        before = self._bytes.clone()
        free = random.sample(range(self._pool.num_pages), self._pool.num_pages)
        keys, expected = [], before.clone()
        for prompt in prompts:
            self._uid += 1
            req = make_req(prompt.ids, uid=self._uid)
            await self._engine.call(commands.Admit(req))
            count = len(self._spans(prompt))
            keys.append((req.key, prompt, [free.pop() for _ in range(count)]))
        for key, prompt, pages in keys:
            destination = commands.Destination(
                "cuda_ipc", tuple(pages), prompt.held, time.monotonic() + LEASE_SECONDS, pair_id="pair", ticket=str(key)
            )
            self._engine.post(commands.Compute(key, destination))
        assert await self._commits(len(keys)) == {str(key): len(pages) for key, _, pages in keys}
        after = self._bytes.clone()
        for key, prompt, pages in keys:
            theirs = await self._engine.call(("pages", key))
            for index, (page, span) in enumerate(zip(pages, self._spans(prompt), strict=True)):
                self._expect(expected, page, theirs[span.start // self._pool.page_size], len(span))
                assert torch.equal(after[page], expected[page]), (
                    f"page {index} of {len(pages)}, of a prompt of {len(prompt.ids)} tokens of which {prompt.held} are held"
                )
            await self._engine.call(commands.Forget(key))
        assert torch.equal(after, expected), "a page of nobody's was written to"
        await self._engine.call(commands.Check())

    def _spans(self, prompt: Prompt) -> list[range]:
        """The tokens of each page that is sent."""
        size, length = self._pool.page_size, len(prompt.ids)
        spans = partial(tokens_of, input_len=length, prefix_len=prompt.held, page_size=size)
        return [spans(index) for index in range(-(-(length - prompt.held) // size))]

    def _expect(self, expected: torch.Tensor, page: int, data: bytes, tokens: int) -> None:
        part = expected[page, :, :, :tokens]
        part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(part.shape))

    async def _commits(self, count: int) -> dict[str, int]:
        """Pages sent, by ticket."""
        loop = asyncio.get_running_loop()
        found: dict[str, int] = {}
        async with asyncio.timeout(COMMIT_SECONDS):
            while len(found) < count:
                request = decode_pb2.CommitRequest.FromString(await loop.sock_recv(self._line, 1 << 17))
                found[request.ticket] = request.pages_sent
        return found


@asynccontextmanager
async def handoffs(build: Build, pool: KVPool, export: PoolExport) -> AsyncIterator[Handoffs]:
    """build: of a PageKeeper, in a process of its own."""
    lines: list[socket.socket] = []
    gone: list[str] = []
    receiver = CudaIpcReceiver(
        export.pool_bytes, is_known="pair".__eq__, on_gone=gone.append, on_line=lambda pair_id, line: lines.append(line)
    )
    receiver.start()
    engine = ProcessEngine(build, on_event=lambda event: None)
    try:
        await engine.start()
        await engine.call(commands.OpenCudaPool("pair", export, socket_name=receiver.socket_name, page_bytes=pool.page_bytes))
        (line,) = lines
        line.setblocking(False)
        yield Handoffs(engine, pool, line)
        await engine.call(commands.ClosePool("pair"))
    finally:
        await engine.close()
        for line in lines:
            line.close()
        await receiver.close()


async def check_all(pair: Handoffs, lengths: Sequence[int], *, page_size: int, vocab: int) -> None:
    """Every length cold, several together, and prefixes that one side has and the other lacks."""
    fresh = partial(_random_ids, random.Random(0), vocab)
    for length in lengths:
        await pair.check(Prompt(fresh(length)))
    await pair.check(*(Prompt(fresh(length)) for length in lengths[1:5]))
    base = fresh(5 * page_size + 3)
    await pair.check(Prompt(base))
    # In the prefill worker's cache alone, on both sides, on both in part; then on the decode worker's side alone.
    await pair.check(Prompt([*base[:-2], *fresh(page_size)]))
    await pair.check(Prompt([*base[:-1], *fresh(9)], held=5 * page_size))
    await pair.check(Prompt([*base, *fresh(2 * page_size)], held=2 * page_size))
    await pair.flush_prefix_cache()
    await pair.check(Prompt([*base, 5], held=3 * page_size), Prompt(fresh(page_size + 1), held=page_size))


def _random_ids(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(count)]
