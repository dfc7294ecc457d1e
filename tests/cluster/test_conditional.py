"""--local-prefill short: a decode worker that is a partner of prefill workers and computes short prompts while those are busy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SMALL
from tests.helpers import reference
from tests.helpers.client import Answer, Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster

SHORT = ("--local-prefill", "short", "--local-prefill-tokens", "64")
LONG = 900
TEN = {"max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def conditional(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its prefill worker computes one token a step, and 100 in line are many."""
    with Cluster(
        tmp_path_factory.mktemp("conditional"),
        tiny,
        worker_args=SMALL,
        prefill_args=["--chunk-tokens", "1"],
        decode_args=SHORT,
        router_args=["--local-prefill-queue", "100"],
    ) as running:
        yield running


def computed_by(answer: Answer) -> str:
    assert answer.started is not None
    return answer.started.prefill_worker.split("-")[0]


async def busy(client: Client) -> asyncio.Task[Answer]:
    """A long prompt on the prefill worker."""
    long = asyncio.create_task(client.generate(prompt(LONG, seed=30), sampling=TEN, timeout=60))

    async def has_much_to_do() -> bool:
        return any(worker.role == "prefill" and worker.in_flight for worker in (await client.workers()).values())

    await eventually(has_much_to_do, within=5)
    return long


async def test_short_prompts_pass_a_busy_prefill_worker_by_with_the_same_tokens(conditional: Cluster, tiny: Path) -> None:
    async with conditional.client() as client:
        idle = await client.generate(prompt(20, seed=1), sampling=TEN)
        assert computed_by(idle) == "prefill", "nobody has to wait: it is an ordinary pair"
        long = await busy(client)

        # Together as many tokens as the decode worker takes at once, and then the longest of the short.
        shorts = [prompt(length, seed=length) for length in (1, 8, 20, 40, 63)]
        answers = await asyncio.gather(*(client.generate(ids, sampling=TEN) for ids in shorts[:-1]))
        answers.append(await client.generate(shorts[-1], sampling=TEN))
        assert not long.done()

        for ids, answer in zip(shorts, answers, strict=True):
            assert answer.ids == reference.greedy(tiny, ids, 10)
            assert computed_by(answer) == "decode"
        handed_over = await long
        assert computed_by(handed_over) == "prefill" and handed_over.ids == reference.greedy(tiny, prompt(LONG, seed=30), 10)
        await conditional.assert_idle(client)


async def test_a_cancelled_local_prompt_gives_everything_back(conditional: Cluster) -> None:
    async with conditional.client() as client:
        await client.flush()
        long = await busy(client)
        call = client.call(prompt(30, seed=31), sampling={"max_tokens": 900, "ignore_eos": True})
        started = (await first_event(call, "started")).started
        assert started.prefill_worker == started.decode_worker
        call.cancel()
        long.cancel()
        await conditional.assert_idle(client)
