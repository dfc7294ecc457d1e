"""Workers that are told to stop finish what they have, however late their router reads it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.helpers import reference
from tests.helpers.client import first_event
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.faults


@pytest.mark.timeout(120)
async def test_lif_01_workers_that_finish_and_leave_while_the_router_is_paused_lose_no_token(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "200", "--max-context", "256"]
    with Cluster(tmp_path, tiny, worker_args=args, patience="") as cluster:
        async with cluster.client() as client:
            ids = prompt(20)
            call = client.call(ids, sampling={"max_tokens": 200, "ignore_eos": True})
            first = await first_event(call, "delta")
            workers = [*cluster.prefill, *cluster.decode]
            cluster.router.pause()
            for worker in workers:
                worker.signal(signal.SIGTERM)
            assert [await asyncio.to_thread(worker.wait, within=20) for worker in workers] == [0, 0]
            cluster.router.resume()  # It finds their last tokens and their leaves, on several connections, all at once.
            tokens = [*first.delta.token_ids, *[token async for event in call for token in event.delta.token_ids]]
            assert len(tokens) == 200 and tokens == reference.best(tiny, ids, tokens)
