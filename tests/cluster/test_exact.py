"""Greedy output equals transformers, token for token, through real processes: each page size, chunk size and transport.

Every page size with every chunk size is checked on the engine alone (tests/unit/test_engine_greedy.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.cluster

CONTEXT = 2112
TOKENS = 64


def lengths(page_size: int) -> list[int]:
    """24 different prompt lengths from 1 to 2000, those around a page among them."""
    around = {max(1, page_size - 1), page_size, page_size + 1, 2 * page_size, 2000}
    others = [1, 2, 3, 5, 7, 13, 17, 31, 33, 50, 63, 66, 100, 127, 129, 200, 255, 257, 400, 511, 700, 1000, 1500]
    return sorted([*around, *[length for length in others if length not in around][: 24 - len(around)]])


@pytest.mark.parametrize(
    ("page_size", "chunk", "transport"), [(1, 64, "shm"), (16, 7, "grpc"), (16, 4096, "shm"), (64, 64, "grpc")]
)
@pytest.mark.timeout(180)
async def test_greedy_output_equals_transformers(tiny: Path, tmp_path: Path, page_size: int, chunk: int, transport: str) -> None:
    args = ["--page-size", str(page_size), "--pool-pages", str(16 * CONTEXT // page_size), "--max-context", str(CONTEXT)]
    with Cluster(
        tmp_path,
        tiny,
        worker_args=[*args, "--max-running", "16"],
        prefill_args=["--chunk-tokens", str(chunk), "--transport", transport, "--verify-handoff"],
    ) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(length, seed=1) for length in lengths(page_size)]
            assert len(prompts) == 24
            await check(client, tiny, prompts, together=1, warm=False)
            await client.flush()
            await check(client, tiny, prompts, together=16, warm=False)
            await cluster.assert_idle(client)  # A prompt is cached once its prefill worker has let go of it.
            await check(client, tiny, prompts, together=16, warm=True)
            await cluster.assert_idle(client)


async def test_qwen3_greedy_output_equals_transformers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "qwen3", qwen3=True, head_dim=24)
    args = ["--page-size", "16", "--pool-pages", "400", "--max-running", "16"]
    with Cluster(tmp_path, model, worker_args=args, prefill_args=["--chunk-tokens", "64", "--verify-handoff"]) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(length, seed=3) for length in (1, 15, 16, 17, 32, 63, 64, 65, 200, 500)]
            await check(client, model, prompts, together=10, warm=False)
            await cluster.assert_idle(client)


async def check(client: Client, model: Path, prompts: list[list[int]], *, together: int, warm: bool) -> None:
    gate = asyncio.Semaphore(together)
    page_size = (await client.model()).page_size

    async def one(ids: list[int]) -> None:
        async with gate:
            answer = await client.generate(ids, sampling={"max_tokens": TOKENS, "ignore_eos": True}, timeout=120)
        assert len(answer.ids) == TOKENS
        assert answer.ids == reference.best(model, ids, answer.ids), f"prompt of {len(ids)}, {together} together, warm={warm}"
        # With pages of one token, two prompts may share their first token or two.
        least, most = (len(ids) - 1) // page_size * page_size if warm else 0, 2 if page_size == 1 else 0
        assert least <= answer.usage.cached_tokens <= max(least, most), f"prompt of {len(ids)}, {answer.usage}"

    await asyncio.gather(*(one(ids) for ids in prompts))
