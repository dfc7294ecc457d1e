"""An engine in a process of its own, and the worker it belongs to: either of them killed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import reference
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt

ARGS = ("--page-size", "4", "--pool-pages", "300", "--max-context", "512", "--engine", "process")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_lif_05_a_killed_engine_ends_its_worker_and_its_requests_move(tiny: Path, tmp_path: Path, role: str) -> None:
    with Cluster(tmp_path, tiny, prefill=2, decode=2, worker_args=ARGS, decode_args=["--lease", "3s"]) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(30, seed=i) for i in range(8)]
            calls = [
                asyncio.ensure_future(client.generate(ids, sampling={"max_tokens": 150, "ignore_eos": True})) for ids in prompts
            ]
            await asyncio.sleep(0.3)
            victims = cluster.prefill if role == "prefill" else cluster.decode
            worker = victims.pop(0)
            (engine,) = psutil.Process(worker.pid).children()
            killed = time.monotonic()
            engine.kill()
            assert await asyncio.to_thread(worker.wait, within=10) == 1
            assert time.monotonic() - killed < 15
            assert "the engine process was killed by SIGKILL" in worker.output
            for ids, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
                assert answer.ids == reference.greedy(tiny, ids, 150)
            await cluster.capacity_probe(client, within=20)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_lif_06_a_killed_worker_s_engine_is_gone_within_a_second(tiny: Path, tmp_path: Path, role: str) -> None:
    with Cluster(tmp_path, tiny, worker_args=ARGS) as cluster:
        worker = (cluster.prefill if role == "prefill" else cluster.decode).pop(0)
        (engine,) = psutil.Process(worker.pid).children()
        worker.kill()
        await eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, within=1)
