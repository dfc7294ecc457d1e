"""Policies behind a real router: what it knows of a call reaches them, and workers may come and go under each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest

from router.fleet.policies import PolicyName
from tests.helpers.client import Answer, Client
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]


def pair_of(answer: Answer) -> tuple[str, str]:
    assert answer.started is not None
    return answer.started.prefill_worker, answer.started.decode_worker


async def ask(client: Client, prompt: list[int] = PROMPT, **fields: Any) -> tuple[str, str]:
    return pair_of(await client.generate(prompt, sampling={"max_tokens": 2}, **fields))


async def test_a_session_named_in_metadata_stays_with_its_workers(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=4, decode=4, policy="session", session_key="x-chat") as stand:
        pairs = {name: await ask(stand.client, metadata={"x-chat": name}) for name in map(str, range(12))}
        assert len(set(pairs.values())) > 3
        assert pairs == {name: await ask(stand.client, metadata={"x-chat": name}) for name in pairs}


async def test_equal_prefixes_go_to_one_worker(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=4, policy="prefix") as stand:
        system = [[i] * 200 for i in range(12)]
        firsts = [(await ask(stand.client, [*prompt, 1]))[0] for prompt in system]
        assert len(set(firsts)) > 2
        assert firsts == [(await ask(stand.client, [*prompt, 2, 3]))[0] for prompt in system]


@pytest.mark.parametrize("policy", get_args(PolicyName))
async def test_workers_come_and_go_while_requests_run(tiny: Path, policy: PolicyName) -> None:
    async with RouterStand(tiny, prefill=2, decode=2, policy=policy) as stand:

        async def one(i: int) -> Answer:
            prompt = [i % 5] * (70 + i)
            answer = await stand.client.generate(prompt, sampling={"max_tokens": 20}, metadata={"x-session-id": str(i % 7)})
            assert answer.ids == expected_output(prompt, 20)
            return answer

        requests = [asyncio.create_task(one(i)) for i in range(40)]
        joined = [(await stand.add_prefill()).worker_id, (await stand.add_decode()).worker_id]
        await stand.ready()
        requests += [asyncio.create_task(one(i)) for i in range(40, 80)]
        await asyncio.sleep(0.05)
        await stand.prefill.pop(0).close()
        await stand.decode.pop(0).close()
        pairs = [pair_of(answer) for answer in await asyncio.gather(*requests)]
        if policy != "session":  # Seven sessions need not have a home on a certain worker.
            assert set(joined) <= {worker_id for pair in pairs for worker_id in pair}
