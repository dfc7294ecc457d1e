"""Warm answers are cold answers; sharing and eviction lose nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cluster.conftest import PAGE
from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 1])
async def test_pfx_01_warm_and_cold_answers_are_the_same(cluster: Cluster, client: Client, tiny: Path, length: int) -> None:
    await client.flush()
    ids = prompt(length, seed=1)
    answers = []
    for _ in range(6):
        answers.append(await client.generate(ids, logprobs=0, sampling={"max_tokens": 64, "ignore_eos": True}))
        await cluster.assert_idle(client)  # A prompt is cached once its prefill worker has let go of it.
    assert all(answer.ids == reference.greedy(tiny, ids, 64) for answer in answers)
    cold = [entry.logprob for entry in answers[0].only.logprobs]
    for warm in answers[1:]:
        assert [entry.logprob for entry in warm.only.logprobs] == pytest.approx(cold, abs=1e-4)
        assert warm.usage.cached_tokens == (length - 1) // PAGE * PAGE


async def test_pfx_01_a_conversation_continues_from_both_caches(client: Client, tiny: Path) -> None:
    ids = prompt(20, seed=77)
    for _ in range(4):
        answer = await client.generate(ids, sampling={"max_tokens": 11, "ignore_eos": True})
        assert answer.ids == reference.greedy(tiny, ids, 11)
        ids = ids + answer.ids + prompt(3, seed=len(ids))


@pytest.mark.timeout(120)
async def test_pfx_03_accounting_survives_heavy_sharing_and_eviction(tiny: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    families = [prompt(rng.randint(5, 40), seed=i) for i in range(20)]
    args = ["--page-size", "4", "--pool-pages", "100", "--max-context", "128", "--max-running", "16"]
    with Cluster(tmp_path, tiny, worker_args=args) as cluster:
        async with cluster.client() as client:
            gate = asyncio.Semaphore(16)

            async def one(i: int) -> None:
                family = families[rng.randrange(20)]
                ids = family[: rng.randint(1, len(family))] + prompt(rng.randint(0, 7), seed=i)
                async with gate:
                    call = client.call(ids, sampling={"max_tokens": 6, "ignore_eos": True})
                    if rng.random() < 0.2:
                        await asyncio.sleep(rng.random() * 0.03)
                        call.cancel()
                        return
                    output = [token async for event in call for token in event.delta.token_ids]
                    assert output == reference.greedy(tiny, ids, 6)

            await asyncio.gather(*(one(i) for i in range(400)))
            await cluster.capacity_probe(client)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.timeout(120)
async def test_pfx_07_eviction_with_pages_of_any_size(tiny: Path, tmp_path: Path, page_size: int) -> None:
    rng = random.Random(page_size)
    args = ["--page-size", str(page_size), "--pool-pages", "20", "--max-context", str(20 * page_size)]
    with Cluster(tmp_path, tiny, worker_args=args) as cluster:
        async with cluster.client() as client:
            gate = asyncio.Semaphore(4)

            async def one(i: int) -> None:
                ids = prompt(max(1, rng.randint(1, 5) * page_size - rng.randint(0, 1)), seed=i)
                async with gate:
                    answer = await client.generate(ids, sampling={"max_tokens": 3, "ignore_eos": True})
                assert answer.ids == reference.greedy(tiny, ids, 3)

            await asyncio.gather(*(one(i) for i in range(120)))
            await cluster.capacity_probe(client)


async def test_flush_cache_drops_every_unused_page(client: Client) -> None:
    await client.generate(prompt(50, seed=5), sampling={"max_tokens": 20, "ignore_eos": True})
    assert await client.flush() >= 12 + 17
    assert await client.flush() == 0

    async def every_page_is_free() -> bool:
        return all(worker.free_pages == worker.total_pages for worker in (await client.workers()).values())

    await eventually(every_page_is_free, within=2)


async def test_flush_cache_leaves_running_requests_alone(client: Client, tiny: Path) -> None:
    ids = prompt(30, seed=8)
    running = asyncio.ensure_future(client.generate(ids, sampling={"max_tokens": 200, "ignore_eos": True}))
    for _ in range(10):
        await client.flush()
        await asyncio.sleep(0.02)
    assert (await running).ids == reference.greedy(tiny, ids, 200)


async def test_an_unknown_method_is_unimplemented(client: Client) -> None:
    call: Any = client.channel.unary_unary("/pdserve.v1.GenerationService/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
