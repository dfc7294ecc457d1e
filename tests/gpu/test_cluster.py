"""Whole clusters on GPUs: KV that is stored into the decode worker's pages gives the tokens that one engine gives alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer", reason="flashinfer is not installed")

from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

START_SECONDS = 150.0
WORKER = (
    "--memory-fraction",
    "0.2",
    "--pool-pages",
    "200",
    "--max-running",
    "8",
    "--chunk-tokens",
    "512",
    "--max-context",
    "4096",
)
DECODE = ("--graph-sizes", "1,2,4,8")
INSIST = ("--transport", "cuda_ipc", "--verify-handoff")
LENGTHS = (1, 63, 64, 65, 128, 500, 700, 1500)
GREEDY: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "layers": 3, "vocab": 700}
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **shape)


@pytest.fixture(scope="module")
def colocated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One engine with both roles: no handoff."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    args = (*DECODE, "--local-prefill", "always")
    folder = tmp_path_factory.mktemp("colocated")
    with Cluster(
        folder,
        model,
        prefill=0,
        worker_args=("--device", "cuda:0", *WORKER),
        decode_args=args,
        start_seconds=START_SECONDS,
    ) as running:
        yield running


@pytest.fixture(scope="module", params=[1, 2], ids=["one-gpu", "two-gpus"])
def split(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode workers, so that one may be killed."""
    gpus: int = request.param
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, torch sees {torch.cuda.device_count()}")
    with Cluster(
        tmp_path_factory.mktemp("split"),
        model,
        decode=2,
        worker_args=[word for word in WORKER if word not in ("--chunk-tokens", "512")],
        prefill_args=("--device", "cuda:0", "--chunk-tokens", "512", *INSIST),
        decode_args=("--device", f"cuda:{gpus - 1}", *DECODE),
        start_seconds=START_SECONDS,
    ) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 600, (length,), generator=generator).tolist()


async def greedy(client: Client, seed: int) -> list[list[int]]:
    """One at a time, so that batch, padded size and chunks are the same wherever it is done."""
    return [(await client.generate(prompt(length, seed), sampling=GREEDY, timeout=60)).ids for length in LENGTHS]


async def test_greedy_tokens_are_those_of_one_engine_without_handoff_cold_and_warm(split: Cluster, colocated: Cluster) -> None:
    async with split.client() as there, colocated.client() as here:
        for _ in ("cold", "warm"):
            assert await greedy(there, 1) == await greedy(here, 1)
        await split.assert_idle(there)
        await colocated.assert_idle(here)


async def test_prompts_in_a_batch_and_several_completions_all_come_and_leave_nothing(split: Cluster) -> None:
    async with split.client() as client:
        calls = [client.generate(prompt(length, 2), n=2, sampling=GREEDY, timeout=60) for length in LENGTHS]
        for answer in await asyncio.gather(*calls):
            assert [len(answer.completions[i].ids) for i in range(2)] == [40, 40]
            assert answer.completions[0].ids == answer.completions[1].ids
        await split.assert_idle(client)


async def test_a_decode_worker_killed_in_mid_stream_loses_no_request(split: Cluster) -> None:
    """The last test of its cluster: the prefill engine may end with the memory it was storing into, and nobody starts another."""
    async with split.client() as client:
        params = {"max_tokens": 1500, "ignore_eos": True}
        calls = [asyncio.ensure_future(client.generate(prompt(30 + i, 3), sampling=params, timeout=90)) for i in range(6)]
        await eventually(lambda: _running(client, 6), within=30)
        split.decode.pop(0).kill()
        answers = await asyncio.gather(*calls)
        assert [len(answer.ids) for answer in answers] == [1500] * 6
        await split.assert_idle(client, within=10)


async def _running(client: Client, count: int) -> bool:
    return sum(worker.running for worker in (await client.workers()).values()) >= count
