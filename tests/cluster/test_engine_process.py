"""Both workers with their engines in processes of their own (--engine process): the same answers, the same ends, nothing left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers import reference
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import Process
from tests.helpers.prompts import prompt

ARGS = ("--page-size", "4", "--pool-pages", "600", "--max-context", "256", "--max-running", "8", "--engine", "process")


@pytest.fixture(scope="module", params=["shm", "grpc"])
def split(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    prefill = ["--chunk-tokens", "16", "--transport", request.param, "--verify-handoff"]
    with Cluster(tmp_path_factory.mktemp("split"), tiny, worker_args=ARGS, prefill_args=prefill) as cluster:
        yield cluster


def engine_of(worker: Process) -> psutil.Process:
    (engine,) = psutil.Process(worker.pid).children()
    return engine


@pytest.mark.timeout(120)
async def test_greedy_output_equals_transformers(split: Cluster, tiny: Path) -> None:
    prompts = [prompt(length, seed=1) for length in (1, 3, 4, 5, 16, 17, 40, 100)]
    async with split.client() as client:
        for _ in range(2):  # Cold, then with every prefix cached.
            answers = await asyncio.gather(*(greedy(client, ids) for ids in prompts))
            assert answers == [reference.greedy(tiny, ids, 24) for ids in prompts]
            await split.assert_idle(client)


async def test_cancelled_calls_leave_nothing_behind(split: Cluster) -> None:
    async with split.client() as client:
        calls = [client.call(prompt(60, seed=i), sampling={"max_tokens": 150, "ignore_eos": True}) for i in range(12)]
        await asyncio.gather(*(first_event(call, "delta") for call in calls[:4]))
        for call in calls:
            call.cancel()
        await split.capacity_probe(client)


@pytest.mark.timeout(120)
async def test_told_to_stop_a_worker_finishes_what_runs_and_its_engine_goes_with_it(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, worker_args=[*ARGS, "--max-context", "8192"]) as cluster:
        async with cluster.client() as client:
            workers = [*cluster.prefill, *cluster.decode]
            engines = [engine_of(worker) for worker in workers]
            for worker, name in zip(workers, ("prefill", "decode"), strict=True):
                assert f"INFO  {name} engine  max context is 4096 tokens" in worker.output
            ids = prompt(20)
            call = client.call(ids, sampling={"max_tokens": 200, "ignore_eos": True})
            first = await first_event(call, "delta")
            for worker, engine in zip(workers, engines, strict=True):
                engine.send_signal(signal.SIGINT)  # As a terminal does to the whole group.
                worker.signal(signal.SIGINT)
            tokens = [*first.delta.token_ids, *[token async for event in call for token in event.delta.token_ids]]
            assert len(tokens) == 200 and tokens == reference.best(tiny, ids, tokens)
            assert [await asyncio.to_thread(worker.wait, within=20) for worker in workers] == [0, 0]
            assert not any(engine.is_running() for engine in engines)


async def greedy(client: Client, ids: list[int]) -> list[int]:
    return (await client.generate(ids, sampling={"max_tokens": 24, "ignore_eos": True})).ids


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_told_to_stop_while_the_engine_loads_a_worker_ends_it_at_once(tiny: Path, tmp_path: Path, role: str) -> None:
    args = ["--model", str(tiny), "--engine", "process"]
    worker = Process(f"{role}_worker", args, log=tmp_path / "log")
    try:
        await eventually(lambda: len(psutil.Process(worker.pid).children()) == 1, within=30)
        engine = engine_of(worker)
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, within=5) == 0
        assert not engine.is_running() and "ready on" not in worker.output
    finally:
        worker.kill()
