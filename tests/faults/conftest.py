"""The fault tests use the cluster tests' models and shared clusters, and one of four workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import client, cluster, counting, counting_cluster, counting_model, tiny
from tests.helpers.cluster import Cluster

__all__ = ["client", "cluster", "counting", "counting_cluster", "counting_model", "four", "tiny"]

COUNTING = ("--page-size", "4", "--pool-pages", "3000", "--max-context", "1024", "--max-running", "32")
"""For workers of the model that counts. Room also for what a stopped prefill worker keeps a decode worker from using."""


@pytest.fixture(scope="session")
def four(counting_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """2 prefill and 2 decode workers of the model that counts; every test leaves as many in working order."""
    with Cluster(
        tmp_path_factory.mktemp("four"), counting_model, prefill=2, decode=2, worker_args=COUNTING, patience=""
    ) as running:
        yield running
