"""Workers that do not go together: refused when they register, named in both values, and no health is claimed for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.cluster

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = "pdserve.v1.GenerationService"
POOL = ("--page-size", "4", "--pool-pages", "64", "--max-context", "128")


async def readiness(client: Client) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION), timeout=5)).status


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--page-size", "8"], ("page_size", "8", "4")),
        (["--dtype", "bfloat16"], ("dtype", "bfloat16", "float32")),
        (["--max-context", "64"], ("max_context", "64", "128")),
    ],
    ids=["page size", "dtype", "context"],
)
async def test_cmp_01_a_misfit_is_refused_at_registration_naming_both_values(
    tiny: Path, tmp_path: Path, args: list[str], values: tuple[str, ...]
) -> None:
    with Cluster(tmp_path, tiny, decode=0, worker_args=POOL, is_awaited=False) as cluster:
        async with cluster.client() as client:
            misfit = cluster.start_worker("decode", extra=args)
            line = await asyncio.to_thread(misfit.wait_for_line, "no registration with router.*differs.*")
            assert all(value in line[0] for value in values)
            assert await readiness(client) == NOT_SERVING
            code, message = await client.refusal([1, 2], timeout=10)
            assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
            assert all(value in message for value in values)


def other_merges(folder: Path) -> Path:
    """The same weights, and a tokenizer that makes other tokens of some words."""
    make_tiny_model(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].reverse()
    path.write_text(json.dumps(tokenizer))
    return folder


OTHERS: dict[str, Callable[[Path], Path]] = {
    "weights": lambda folder: make_tiny_model(folder, seed=1),
    "layers": lambda folder: make_tiny_model(folder, layers=3),
    "heads": lambda folder: make_tiny_model(folder, heads=8),
    "kv_heads": lambda folder: make_tiny_model(folder, kv_heads=4),
    "length": lambda folder: make_tiny_model(folder, max_context=2048),
    "tokenizer": other_merges,
}


async def test_cmp_03_health_is_not_reported_for_a_pair_that_cannot_work(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, decode=0, worker_args=POOL, is_awaited=False) as cluster:
        async with cluster.client() as client:
            misfits = {
                name: cluster.start_worker("decode", extra=["--model", str(make(tmp_path / name))])
                for name, make in OTHERS.items()
            }
            for name, misfit in misfits.items():
                line = await asyncio.to_thread(misfit.wait_for_line, "no registration with router.*differs.*")
                assert "fingerprint" in line[0], f"{name}: {line[0]}"
            assert await readiness(client) == NOT_SERVING
            for code, message in await asyncio.gather(*(client.refusal([1, 2, i], timeout=10) for i in range(10))):
                assert code is grpc.StatusCode.UNAVAILABLE and "fingerprint" in message
            assert [worker.role for worker in (await client.workers()).values()] == ["prefill"]


async def test_cmp_03_another_version_of_the_product_is_no_obstacle_and_of_the_protocol_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, common.version, common.work\n"
        "common.version.VERSION = '99.0'\n"
        "if 'PROTOCOL' in os.environ:\n"
        "    common.work.Compatibility.__init__.__defaults__ = (common.work.POOL_LAYOUT, 99)\n"
    )
    with Cluster(tmp_path, tiny, decode=0, worker_args=POOL, is_awaited=False) as cluster:
        async with cluster.client() as client:
            monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
            monkeypatch.setenv("PROTOCOL", "99")
            misfit = cluster.start_worker("decode")
            monkeypatch.delenv("PROTOCOL")
            fit = cluster.start_worker("decode")
            line = await asyncio.to_thread(misfit.wait_for_line, "no registration with router.*differs.*")
            assert all(value in line[0] for value in ("protocol_version", "99", "1"))
            await asyncio.to_thread(fit.wait_for_line, "decode worker 99.0:")
            await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")
            assert await readiness(client) == SERVING
            assert len((await client.generate([1, 2], sampling={"max_tokens": 5, "ignore_eos": True})).ids) == 5
