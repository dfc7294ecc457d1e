"""Decode workers that compute prompts themselves, behind the same router: same answers, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import CHUNK, PAGE, SMALL
from tests.helpers import reference
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster

ALWAYS = ("--local-prefill", "always", "--chunk-tokens", str(CHUNK))


@pytest.fixture(scope="module", params=["thread", "process"])
def colocated(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker that does both, with its engine in either."""
    folder, engine = tmp_path_factory.mktemp("colocated"), ("--engine", request.param)
    with Cluster(folder, tiny, prefill=0, decode=1, worker_args=SMALL, decode_args=[*ALWAYS, *engine]) as running:
        yield running


@pytest.fixture
async def alone(colocated: Cluster) -> AsyncIterator[Client]:
    async with colocated.client() as connected:
        yield connected
        await colocated.assert_idle(connected)


async def test_greedy_output_is_that_of_the_split_cluster_and_of_transformers(client: Client, alone: Client, tiny: Path) -> None:
    prompts = [prompt(length, seed=21) for length in (1, PAGE - 1, PAGE, PAGE + 1, 33, CHUNK, CHUNK + 1, 200, 500)]
    params = {"max_tokens": 32, "ignore_eos": True}
    for together in (False, True):
        calls = [alone.generate(ids, sampling=params, timeout=60) for ids in prompts]
        answers = await asyncio.gather(*calls) if together else [await call for call in calls]
        split = await asyncio.gather(*(client.generate(ids, sampling=params, timeout=60) for ids in prompts))
        for ids, answer, other in zip(prompts, answers, split, strict=True):
            assert answer.ids == other.ids == reference.greedy(tiny, ids, 32)
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 32)


async def test_usage_and_started_tell_what_was_cached_and_who_worked(colocated: Cluster, alone: Client) -> None:
    ids = prompt(41, seed=22)
    await alone.flush()
    cold = await alone.generate(ids, sampling={"max_tokens": 5, "ignore_eos": True})
    warm = await alone.generate(ids, sampling={"max_tokens": 5, "ignore_eos": True})
    single = await alone.generate(ids, sampling={"max_tokens": 1})
    assert [answer.usage.cached_tokens for answer in (cold, warm, single)] == [0, 40, 40]
    (worker,) = (await alone.workers()).values()
    for answer in (cold, warm):
        assert answer.started is not None and answer.started.cached_tokens == answer.usage.cached_tokens
        assert (answer.started.prefill_worker, answer.started.decode_worker) == (worker.id, worker.id)
    timing = cold.only.end.timing
    assert timing.attempts == 1 and timing.prefill_ms > 0


async def test_several_completions_and_seeds_are_those_of_the_split_cluster(client: Client, alone: Client) -> None:
    ids = prompt(18, seed=23)
    params = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    one, two = await asyncio.gather(*(where.generate(ids, n=3, sampling=params) for where in (client, alone)))
    assert [one.completions[i].ids for i in range(3)] == [two.completions[i].ids for i in range(3)]


async def test_a_cancel_while_the_prompt_is_computed_or_while_it_runs_leaves_nothing(colocated: Cluster, alone: Client) -> None:
    for wait_for_token in (False, True):
        call = alone.call(prompt(900, seed=24), sampling={"max_tokens": 100, "ignore_eos": True})
        if wait_for_token:
            await first_event(call, "delta")
        else:
            await asyncio.sleep(0.02)
        call.cancel()
        await colocated.assert_idle(alone)


async def test_a_short_deadline_ends_a_long_prompt(colocated: Cluster, alone: Client) -> None:
    with pytest.raises(Exception, match="(?i)deadline"):
        await alone.generate(prompt(1000, seed=25), sampling={"max_tokens": 2}, timeout=0.03)
    await colocated.assert_idle(alone)


@pytest.mark.timeout(120)
async def test_a_killed_worker_s_requests_go_on_at_another_that_prefills_itself(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, prefill=0, decode=2, worker_args=SMALL, decode_args=ALWAYS) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(30 + i, seed=26) for i in range(6)]
            params = {"max_tokens": 400, "ignore_eos": True}
            running = [asyncio.ensure_future(client.generate(ids, sampling=params, timeout=60)) for ids in prompts]
            await asyncio.sleep(0.2)
            cluster.decode.pop(0).kill()
            answers = await asyncio.gather(*running)
            assert [answer.ids for answer in answers] == [reference.greedy(tiny, ids, 400) for ids in prompts]
            assert max(answer.only.end.timing.attempts for answer in answers) > 1, "nobody was on the killed worker"
            await cluster.capacity_probe(client)


@pytest.mark.timeout(120)
async def test_out_of_pages_and_drained_nothing_is_lost(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "60", "--max-context", "128", "--max-running", "8"]
    with Cluster(tmp_path, tiny, prefill=0, decode=2, worker_args=args, decode_args=ALWAYS) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(5 + i, seed=27) for i in range(16)]
            params = {"max_tokens": 60, "ignore_eos": True}
            running = [asyncio.ensure_future(client.generate(ids, sampling=params, timeout=60)) for ids in prompts]
            await asyncio.sleep(0.1)
            leaving = cluster.decode.pop(0)
            assert await asyncio.to_thread(leaving.stop, within=30) == 0
            assert [answer.ids for answer in await asyncio.gather(*running)] == [
                reference.greedy(tiny, ids, 60) for ids in prompts
            ]
            await cluster.capacity_probe(client)


async def test_a_split_pair_and_a_worker_alone_serve_one_router(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, worker_args=SMALL) as cluster:
        both = cluster.start_worker("decode", extra=ALWAYS)
        await asyncio.to_thread(cluster.wait_until_joined, both)
        async with cluster.client() as client:
            prompts = [prompt(20 + i, seed=28) for i in range(8)]
            params = {"max_tokens": 20, "ignore_eos": True}
            answers = await asyncio.gather(*(client.generate(ids, sampling=params) for ids in prompts))
            assert [answer.ids for answer in answers] == [reference.greedy(tiny, ids, 20) for ids in prompts]
            kinds = {answer.started.prefill_worker == answer.started.decode_worker for answer in answers if answer.started}
            assert kinds == {True, False}
            await cluster.assert_idle(client)
