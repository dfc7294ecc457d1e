"""Simulated fleets that are hurt: what each fault does, and that neither a token nor a page is lost by it."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from bench.fleet.fleet import Fleet, Plan
from bench.fleet.model import make_model
from bench.soak.__main__ import soak
from tests.helpers.client import Answer, Client
from tests.helpers.eventually import eventually
from tests.helpers.process import ROOT, Process, free_port
from tests.helpers.prompts import prompt
from tests.helpers.sim import assert_expected

pytestmark = pytest.mark.faults
SAMPLING = {"max_tokens": 60, "ignore_eos": True}
SOAK_SEED = 3
"""One that kills four workers."""
PROMPTS = [[token % 256 for token in prompt(200, seed=seed)] for seed in range(12)]


@asynccontextmanager
async def fleet_of(folder: Path, *, prefill: int = 2, decode: int = 2) -> AsyncIterator[tuple[Fleet, Client, Path]]:
    """A fleet in one process, its router's client, and the model."""
    model, address = make_model(folder / "model"), f"127.0.0.1:{free_port()}"
    router = Process("router", ["--model", str(model), "--listen", address], log=folder / "router.log")
    plan = Plan(model=model, router=address, prefill=prefill, decode=decode, revive=0.1, decode_args=("--lease", "2s"))
    try:
        await asyncio.to_thread(router.wait_for_line, "listening on")
        async with Fleet(plan, log=folder / "fleet.log") as fleet, Client(address) as client:
            await eventually(lambda: are_all_there(client, prefill + decode), within=20)
            yield fleet, client, model
            assert "Traceback" not in router.output
    finally:
        router.kill()


async def are_all_there(client: Client, count: int) -> bool:
    """So many workers are registered, and all are idle with every page free or cached."""
    workers = (await client.workers()).values()
    assert len(workers) == count, f"{len(workers)} of {count} workers"
    for worker in workers:
        busy = (worker.running, worker.waiting, worker.held_pages, worker.quarantined_pages)
        assert busy == (0, 0, 0, 0), f"{worker.id}: running, waiting, held, quarantined = {busy}"
        assert worker.free_pages + worker.cached_pages == worker.total_pages
    return True


async def ask_all(client: Client, *, when_begun: list[str], fleet: Fleet) -> list[Answer]:
    """All prompts at once; the orders are given once the first tokens have come."""
    answers = [Answer() for _ in PROMPTS]

    async def ask(ids: list[int], answer: Answer) -> None:
        async for event in client.call(ids, sampling=SAMPLING):
            answer.add(event)

    asking = [asyncio.create_task(ask(*each)) for each in zip(PROMPTS, answers, strict=True)]
    await eventually(lambda: any(answer.completions for answer in answers), within=10, every=0.002)
    for order in when_begun:
        await fleet.order(order)
    await asyncio.gather(*asking)
    return answers


def has_done(fleet: Fleet, orders: int) -> bool:
    return fleet.done.total() == orders


HURTS: list[tuple[list[str], list[str], bool]] = [
    (["fail prefill-0 1 0.6"], [], True),
    ([], ["kill decode-0"], True),
    ([], ["kill prefill-1"], False),
    ([], ["pause decode-1 0.3", "slow prefill-0 5 0.3"], False),
]
"""Orders before the prompts are sent, orders once they are being answered, and whether some take a second attempt for sure."""


@pytest.mark.timeout(60)
async def test_workers_killed_paused_slowed_and_failing_cost_no_token_and_no_page(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as (fleet, client, model):
        before, orders = set(await client.workers()), 0
        for first, then, is_noticed in HURTS:
            for order in first:
                await fleet.order(order)
            answers = await ask_all(client, when_begun=then, fleet=fleet)
            orders += len(first) + len(then)
            for ids, answer in zip(PROMPTS, answers, strict=True):
                assert_expected(answer, ids, 60, model=model)
            if is_noticed:
                assert max(answer.only.end.timing.attempts for answer in answers) > 1, (first, then)
            # Many faults at a time may use up all attempts.
            await eventually(partial(has_done, fleet, orders), within=10)
        assert fleet.done == {"kill": 2, "pause": 1, "slow": 1, "fail": 1}
        await eventually(lambda: are_all_there(client, 4), within=20)
        assert len(before & set(await client.workers())) == 2, "two have successors"
        assert fleet.refused == []


@pytest.mark.timeout(60)
def test_python_m_bench_fleet_takes_orders_and_ends_with_its_input(tmp_path: Path) -> None:
    model, address = make_model(tmp_path / "model"), f"127.0.0.1:{free_port()}"
    line = ["--model", str(model), "--router", address, "--decode", "2", "--log", str(tmp_path / "fleet.log")]
    done = subprocess.run(
        [sys.executable, "-m", "bench.fleet", *line],
        input="stat\nkill nobody\npause decode-1 0\ndrown decode-1\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    ready, stat, *refused = done.stdout.splitlines()
    assert ready.startswith("fleet ready: 1 prefill, 2 decode, processes [")
    assert "'members': 3, 'ended': []" in stat
    assert refused == [
        "error: a member must be one of prefill-0 to decode-1, got 'nobody'",
        "error: an order must be stat or one of kill, stop, pause, slow, fail with a name and its numbers, got 'drown decode-1'",
    ]


@pytest.mark.timeout(60)
async def test_a_worker_that_is_told_to_stop_drains_and_leaves(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, prefill=1, decode=2) as (fleet, client, model):
        answers = await ask_all(client, when_begun=["stop decode-0"], fleet=fleet)
        for ids, answer in zip(PROMPTS, answers, strict=True):
            assert_expected(answer, ids, 60, model=model)
        await eventually(lambda: fleet.done["stop"] == 1, within=10)
        with pytest.raises(ValueError, match="a member must be one of prefill-0 to decode-1, got 'decode-9'"):
            await fleet.order("kill decode-9")
        await fleet.order("kill decode-0")
        await eventually(lambda: fleet.refused == ["no member is called 'decode-0' here (it may be dead)"], within=5)
        await fleet.order("kill decode-1")  # Its successor brings the number back to what the fleet began with, less one.
        await eventually(lambda: are_all_there(client, 2), within=20)


@pytest.mark.timeout(60)
async def test_a_short_soak_finds_no_wrong_text_and_every_page(tmp_path: Path) -> None:
    """`make soak` in its short form; how memory goes takes longer to say."""
    args = argparse.Namespace(
        model=None,
        requests=400,
        faults=0.03,
        fault_seconds=0.3,
        prefill=3,
        decode=3,
        processes=1,
        concurrency=32,
        time_scale=20.0,
        seed=SOAK_SEED,
    )
    verdict, memory = await soak(args, tmp_path)
    assert (verdict.wrong, dict(verdict.failed), verdict.leaks) == ([], {}, "")
    assert verdict.right + verdict.cancelled == verdict.asked == 400
    assert verdict.faults["kill"] == 4 and verdict.attempts > 0 and verdict.cached_tokens > 0
    assert all(samples for samples in memory.samples.values())
