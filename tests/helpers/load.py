"""A steady load on a cluster whose model counts (after token t comes t + 1), with every answer checked as it ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from types import TracebackType

import grpc

from tests.helpers.client import Client
from tests.helpers.eventually import eventually

WRAP = 250


def counted(start: int, count: int) -> list[int]:
    """What the counting model says after a prompt that ends in start."""
    return [(start + 1 + i) % WRAP for i in range(count)]


class Load:
    """async with Load(clients): `streams` loops, each sending its next request when the last one has ended. A call that ends
    UNAVAILABLE before anything of it came is sent to the next of the clients, as a client with several addresses would.

    finished: calls that ended well. failed: what the others ended with, and when (time.monotonic()).
    """

    def __init__(
        self, clients: Sequence[Client], *, streams: int = 8, tokens: tuple[int, int] = (5, 60), seconds: float = 20.0
    ) -> None:
        """tokens: least and most per answer. seconds: the calls' deadline."""
        self._clients = clients
        self._streams, self._tokens, self._seconds = streams, tokens, seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.finished = 0
        self.longest_seconds = 0.0
        self.failed: list[tuple[float, str]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._loop(random.Random(i))) for i in range(self._streams)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """Lets the calls under way end."""
        self._is_over = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        wrong = [result for result in results if isinstance(result, AssertionError)]
        if kind is None and wrong:
            raise wrong[0]

    async def _loop(self, rng: random.Random) -> None:
        while not self._is_over:
            start, count = rng.randrange(WRAP), rng.randint(*self._tokens)
            began = time.monotonic()
            error = await self._call([rng.randrange(WRAP) for _ in range(rng.randint(0, 40))] + [start], counted(start, count))
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
            if error is None:
                self.finished += 1
            else:
                self.failed.append((time.monotonic(), error))
                await asyncio.sleep(0.1)

    async def _call(self, ids: list[int], expected: list[int]) -> str | None:
        """What it ended with, None if well."""
        for client in self._clients:
            got: list[int] = []
            try:
                async for event in client.call(ids, sampling={"max_tokens": len(expected)}, timeout=self._seconds):
                    got += event.delta.token_ids
            except grpc.aio.AioRpcError as error:
                assert got == expected[: len(got)], "a token is lost or doubled"
                if not got and error.code() is grpc.StatusCode.UNAVAILABLE and client is not self._clients[-1]:
                    continue
                return f"{error.code().name} after {len(got)} of {len(expected)} tokens: {error.details()}"
            assert got == expected, "a token is lost or doubled"
            return None
        raise AssertionError("a load needs a client")


class Stream:
    """One answer of the counting model being read."""

    def __init__(self, client: Client, start: int, *, tokens: int = 900, context: int = 0) -> None:
        """context: tokens of the prompt in front of start."""
        self.expected = counted(start, tokens)
        self.ids: list[int] = []
        self.attempts = 0
        """Once it has ended well."""
        self._call = client.call(
            [(start + i) % 250 for i in range(context)] + [start], sampling={"max_tokens": tokens}, timeout=60
        )
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._call:
            self.ids += event.delta.token_ids
            if event.HasField("finished"):
                assert event.finished.usage.completion_tokens == len(self.expected)
                self.attempts = event.finished.timing.attempts

    async def reaches(self, tokens: int) -> None:
        await eventually(lambda: len(self.ids) >= tokens or self._task.done(), within=20, every=0.005)

    @property
    def has_ended(self) -> bool:
        """Well or not."""
        return self._task.done()

    async def end(self) -> None:
        """It ended well, every token once."""
        await self._task
        assert self.ids == self.expected
