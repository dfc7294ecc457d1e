"""Clusters shared by a session's tests; each test ends with the cluster idle and every page accounted for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.successor_model import VOCAB, make_successor_model
from tests.helpers.tiny_model import make_tiny_model

PAGE = 4
CHUNK = 64
CONTEXT = 1024
SMALL = ("--page-size", str(PAGE), "--pool-pages", "600", "--max-context", str(CONTEXT), "--max-running", "32")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker of the random model."""
    with Cluster(
        tmp_path_factory.mktemp("cluster"), tiny, worker_args=SMALL, prefill_args=["--chunk-tokens", str(CHUNK)]
    ) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with cluster.client() as connected:
        yield connected
        await cluster.assert_idle(connected)


@pytest.fixture(scope="session")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts: after token t comes t + 1, and after 249 comes 0."""
    return make_successor_model(tmp_path_factory.mktemp("models") / "counting", lambda t: (t + 1) % 250 if t < 250 else VOCAB - 1)


@pytest.fixture(scope="session")
def counting_cluster(counting_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of the model that counts."""
    folder = tmp_path_factory.mktemp("counting")
    with Cluster(folder, counting_model, worker_args=SMALL, prefill_args=["--chunk-tokens", str(CHUNK)]) as running:
        yield running


@pytest.fixture
async def counting(counting_cluster: Cluster) -> AsyncIterator[Client]:
    async with counting_cluster.client() as connected:
        yield connected
        await counting_cluster.assert_idle(connected)
