"""Lengths at their limits: context, page, chunk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.cluster.conftest import CHUNK, CONTEXT, PAGE
from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster


def greedy(max_tokens: int) -> dict[str, object]:
    return {"max_tokens": max_tokens, "ignore_eos": True}


async def test_bnd_01_a_prompt_longer_than_the_context_is_refused_and_the_next_works(client: Client, tiny: Path) -> None:
    for length in (CONTEXT + 1, 5 * CONTEXT, 100_000):
        code, message = await client.refusal(prompt(length), timeout=5)
        assert code is grpc.StatusCode.OUT_OF_RANGE
        assert str(length) in message and str(CONTEXT - 1) in message
    ids = prompt(9)
    assert (await client.generate(ids, sampling=greedy(4))).ids == reference.greedy(tiny, ids, 4)


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"ignore_eos": True}], ids=["max_tokens=1", "max_tokens unset"])
async def test_bnd_02_a_prompt_of_max_context_less_one_gives_one_token_and_one_more_is_refused(
    client: Client, tiny: Path, sampling: dict[str, object]
) -> None:
    ids = prompt(CONTEXT - 1)
    answer = await client.generate(ids, sampling=sampling)
    assert answer.ids == reference.greedy(tiny, ids, 1) and answer.reason == "LENGTH"
    code, message = await client.refusal(prompt(CONTEXT), sampling=sampling)
    assert code is grpc.StatusCode.OUT_OF_RANGE and str(CONTEXT) in message


async def test_bnd_04_max_tokens_unset_stops_at_a_stop_token_or_at_the_context(client: Client, tiny: Path) -> None:
    ids = prompt(20)
    third = reference.greedy(tiny, ids, 3)[2]
    early = await client.generate(ids, sampling={"ignore_eos": True, "stop_token_ids": [third]})
    assert early.reason == "STOP" and early.ids[-1] == third and len(early.ids) <= 3
    long = prompt(CONTEXT - 100)
    answer = await client.generate(long, sampling={"ignore_eos": True})
    assert answer.reason == "LENGTH" and answer.ids == reference.greedy(tiny, long, 100)


async def test_max_tokens_beyond_the_context_is_cut_to_it(client: Client, tiny: Path) -> None:
    ids = prompt(CONTEXT - 10)
    answer = await client.generate(ids, sampling=greedy(2**31))
    assert answer.reason == "LENGTH" and answer.ids == reference.greedy(tiny, ids, 10)


async def test_bnd_05_prompts_around_a_page_and_a_chunk_alone_and_together_cold_and_warm(client: Client, tiny: Path) -> None:
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + PAGE]
    prompts = [prompt(length, seed=5) for length in lengths]
    expected = [reference.greedy(tiny, ids, 8) for ids in prompts]
    for state in ("cold", "warm"):
        if state == "cold":
            await client.flush()
        assert [(await client.generate(ids, sampling=greedy(8))).ids for ids in prompts] == expected, f"alone, {state}"
    for state in ("cold", "warm"):
        if state == "cold":
            await client.flush()
        answers = await asyncio.gather(*(client.generate(ids, sampling=greedy(8)) for ids in prompts))
        assert [answer.ids for answer in answers] == expected, f"together, {state}"


async def test_bnd_07_sequences_shorter_than_a_page_in_one_batch(tiny: Path, tmp_path: Path) -> None:
    prompts = [prompt(1 + i % 15, seed=70 + i) for i in range(16)]
    with Cluster(tmp_path, tiny, worker_args=["--page-size", "16", "--pool-pages", "64", "--max-context", "128"]) as cluster:
        async with cluster.client() as client:
            answers = await asyncio.gather(*(client.generate(ids, sampling=greedy(16)) for ids in prompts))
            await cluster.assert_idle(client)
    assert [answer.ids for answer in answers] == [reference.greedy(tiny, ids, 16) for ids in prompts]


@pytest.mark.parametrize(
    ("context", "page_size", "pool_tokens"), [(33, 16, 1000), (1000, 32, 100), (31, 16, 33), (100, 32, 1000)]
)
async def test_bnd_09_limits_that_are_not_a_multiple_of_anything(
    tiny: Path, tmp_path: Path, context: int, page_size: int, pool_tokens: int
) -> None:
    pages = -(-pool_tokens // page_size)
    args = ["--page-size", str(page_size), "--pool-pages", str(pages), "--max-context", str(context)]
    with Cluster(tmp_path, tiny, worker_args=args) as cluster:
        async with cluster.client() as client:
            assert (await client.model()).max_context == context
            limit = min(context, pages * page_size)
            for length in (limit - 2, limit - 1):
                ids = prompt(length)
                answer = await client.generate(ids, sampling={"ignore_eos": True})
                assert answer.ids == reference.greedy(tiny, ids, limit - length) and answer.reason == "LENGTH"
            for length in (limit, limit + 1):
                code, message = await client.refusal(prompt(length))
                assert code is grpc.StatusCode.OUT_OF_RANGE
                assert str(context - 1 if limit == context else pages) in message
            ids = prompt(3)
            answer = await client.generate(ids, sampling={"ignore_eos": True})
            assert answer.ids == reference.greedy(tiny, ids, min(1024, limit - 3))
            await cluster.capacity_probe(client)
