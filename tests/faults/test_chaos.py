"""Requests while workers are killed, stopped, cut off and told to leave at random: every answer is right, and no page is lost.

A run is made of its seed: PDSERVE_CHAOS_SEED, else a random one, which is printed with what was done when.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import grpc
import pytest

from tests.helpers import reference
from tests.helpers.chaos import Chaos
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt
from tests.helpers.sim import SIM, assert_expected

pytestmark = pytest.mark.faults

PATIENT = ("--max-attempts", "12", "--pair-wait", "20s")
"""Of a router whose workers fail all the time: 0 requests may."""


def seed_of(run: int) -> int:
    given = os.environ.get("PDSERVE_CHAOS_SEED")
    seed = int(given) + run if given else random.SystemRandom().randrange(1 << 32)
    print(f"PDSERVE_CHAOS_SEED={seed}")
    return seed


class Requests:
    """Random requests to a cluster of a real model, some greedy, some sampled, some cancelled; each answer is checked."""

    def __init__(self, client: Client, model: Path, rng: random.Random) -> None:
        self._client, self._model, self._rng = client, model, rng
        self.finished = self.cancelled = self.retried = 0
        self.failed: list[str] = []

    async def run(self, count: int, *, at_once: int) -> None:
        gate = asyncio.Semaphore(at_once)

        async def one(i: int) -> None:
            async with gate:
                await self._one(i)

        await asyncio.gather(*(one(i) for i in range(count)))

    async def _one(self, i: int) -> None:
        seed = self._rng.randrange(1 << 32) if self._rng.random() < 0.3 else None
        ids, count = prompt(self._rng.randint(1, 200), seed=i % 24), self._rng.randint(1, 80)
        sampling = {"max_tokens": count, "ignore_eos": True} | ({} if seed is None else {"temperature": 1.0, "seed": seed})
        cancel_at = self._rng.randint(0, 40) if self._rng.random() < 0.15 else None
        call = self._client.call(ids, sampling=sampling, timeout=90)
        got: list[int] = []
        try:
            async for event in call:
                got += event.delta.token_ids
                if event.WhichOneof("event") == "finished":
                    self.finished += 1
                    self.retried += event.finished.timing.attempts > 1
                    assert len(got) == count
                if cancel_at is not None and len(got) >= cancel_at:
                    call.cancel()
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            self.cancelled += 1
        except grpc.aio.AioRpcError as error:
            self.failed.append(f"{error.code().name}: {error.details()}")
            return
        right = reference.best(self._model, ids, got) if seed is None else reference.drawn(self._model, ids, got, seed=seed)
        assert got == right, f"{len(ids)} tokens, seed {i % 24}, sampled {seed}"


RUNS = [0, *(pytest.param(run, marks=pytest.mark.long) for run in range(1, 20))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("run", RUNS)
async def test_chaos_of_kills_stops_cuts_and_cancels_loses_no_request_and_no_page(tiny: Path, tmp_path: Path, run: int) -> None:
    rng = random.Random(seed_of(run))
    transport = rng.choice(["shm", "grpc"])
    prefill = ["--transport", transport, "--transfer-timeout", "2s", "--chunk-tokens", "32"]
    args = ["--page-size", "4", "--pool-pages", "300", "--max-context", "512"]
    with Cluster(
        tmp_path,
        tiny,
        prefill=0,
        decode=0,
        worker_args=args,
        prefill_args=prefill,
        decode_args=["--lease", "2s"],
        router_args=PATIENT,
        patience="",
    ) as cluster:
        reference.load(tiny)  # Takes seconds, for which the relays below would stand still.
        kinds = ["kill", "stop", "hold", "cut", "leave"]
        async with Chaos(cluster, rng, counts={"prefill": 2, "decode": 2}, kinds=kinds) as chaos, cluster.client() as client:
            requests = Requests(client, tiny, rng)
            await chaos.during(requests.run(300, at_once=12))
            print(f"{transport}, {dict(chaos.done)}: {requests.finished} finished, {requests.cancelled} cancelled, "
                  f"{requests.retried} took more than one attempt")  # fmt: skip
            assert not requests.failed
            assert requests.finished + requests.cancelled == 300 and requests.retried > 0
            await eventually(lambda: are_ready(client, 4), within=15)
            await cluster.capacity_probe(client, within=20)


async def are_ready(client: Client, count: int) -> bool:
    return [worker.state for worker in (await client.workers()).values()] == ["ready"] * count


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("seconds", "pause"), [(10.0, 0.5), pytest.param(120.0, 2.0, marks=pytest.mark.long)], ids=["short", "long"]
)
async def test_flt_06_requests_never_wait_for_workers_that_come_and_go(
    tiny: Path, tmp_path: Path, seconds: float, pause: float
) -> None:
    rng = random.Random(seed_of(0))
    began = time.monotonic()
    slowest = 0.0
    failed: list[str] = []

    async def loop(client: Client, number: int) -> int:
        nonlocal slowest
        finished = 0
        while time.monotonic() - began < seconds:
            ids, started = prompt(rng.randint(1, 300), seed=number), time.monotonic()
            try:
                answer = await client.generate(ids, sampling={"max_tokens": 30, "ignore_eos": True}, timeout=20)
                assert_expected(answer, ids, 30, model=tiny)
                finished += 1
            except grpc.aio.AioRpcError as error:
                failed.append(f"{error.code().name}: {error.details()}")
            slowest = max(slowest, time.monotonic() - started)
        return finished

    async def loops(client: Client, finished: list[int]) -> None:
        finished += await asyncio.gather(*(loop(client, number) for number in range(20)))

    with Cluster(tmp_path, tiny, prefill=0, decode=0, worker_args=SIM) as cluster:
        three = {"prefill": 3, "decode": 3}
        async with Chaos(cluster, rng, counts=three, kinds=["kill", "leave"], pause=pause) as chaos, cluster.client() as client:
            finished: list[int] = []
            began = time.monotonic()
            await chaos.during(loops(client, finished))
            print(f"{dict(chaos.done)}: {sum(finished)} finished, the slowest took {slowest:.1f} s")
            assert chaos.done.total() >= 3
            assert not failed
            assert slowest < 10 and min(finished) > 0, "somebody was forgotten"
            await eventually(lambda: are_ready(client, 6), within=15)
            await cluster.assert_idle(client)
