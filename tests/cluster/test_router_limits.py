"""The router's limits: context, pools, validation, queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import MAX_CONTEXT, PAGE_SIZE, RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
async def stand(tiny: Path) -> AsyncIterator[RouterStand]:
    async with RouterStand(tiny) as running:
        yield running


async def test_max_tokens_is_cut_to_the_context_and_ends_in_length(stand: RouterStand) -> None:
    prompt = [1] * (MAX_CONTEXT - 10)
    answer = await stand.client.generate(prompt, sampling={"max_tokens": 10_000, "ignore_eos": True})

    assert (answer.ids, answer.reason) == (expected_output(prompt, 10), "LENGTH")


@pytest.mark.parametrize("lacking", [0, 1])
async def test_what_can_never_fit_is_refused_naming_pages_cap_02(tiny: Path, lacking: int) -> None:
    pages = 10
    async with RouterStand(tiny, decode=0) as stand:
        await stand.add_decode(total_pages=pages)
        await stand.ready()
        sampling = {"max_tokens": pages * PAGE_SIZE - len(PROMPT) + lacking, "ignore_eos": True}
        if lacking:
            code, message = await stand.client.refusal(PROMPT, sampling=sampling)
            assert code is grpc.StatusCode.OUT_OF_RANGE
            assert "max_tokens" in message and "10 pages" in message and "11 needed" in message
            assert stand.prefill[0].submits == []
        else:
            answer = await stand.client.generate(PROMPT, sampling=sampling)
            assert len(answer.ids) == pages * PAGE_SIZE - len(PROMPT)


async def test_without_max_tokens_the_output_is_cut_to_the_pools_bnd_04(tiny: Path) -> None:
    async with RouterStand(tiny, decode=0) as stand:
        await stand.add_decode(total_pages=4)
        await stand.ready()
        answer = await stand.client.generate(PROMPT, sampling={"ignore_eos": True})

        assert (len(answer.ids), answer.reason) == (4 * PAGE_SIZE - len(PROMPT), "LENGTH")


async def test_invalid_requests_schedule_nothing_and_mark_no_worker_flt_07(stand: RouterStand) -> None:
    bad = [
        ([], {}, "token_ids"),
        (None, {}, "prompt"),
        ([1] * MAX_CONTEXT, {}, "token_ids"),
        ([10**6], {}, "vocabulary"),
        (PROMPT, {"sampling": {"top_p": 0.0}}, "top_p"),
        (PROMPT, {"sampling": {"max_tokens": 0}}, "max_tokens"),
        ("x" * MAX_CONTEXT * 8, {}, "prompt"),
    ]
    for prompt, fields, named in bad:
        code, message = await stand.client.refusal(prompt, **fields)  # type: ignore[arg-type]
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE) and named in message

    assert stand.prefill[0].submits == []
    assert {worker.state for worker in (await stand.client.workers()).values()} == {"ready"}
    assert (await stand.client.generate(PROMPT, sampling={"max_tokens": 3})).ids == expected_output(PROMPT, 3)


async def test_the_queue_limit_is_named_when_full_cap_06(tiny: Path) -> None:
    async with RouterStand(tiny, max_queue=2) as stand:
        stand.prefill[0].gate.clear()
        waiting = [stand.client.call(PROMPT, sampling={"max_tokens": 2}) for _ in range(2)]
        await eventually(lambda: len(stand.prefill[0].submits) == 2, within=3)

        code, message = await stand.client.refusal(PROMPT)

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "limit is 2" in message and "--max-queue" in message
        stand.prefill[0].gate.set()
        for call in waiting:
            assert [event async for event in call][-1].WhichOneof("event") == "finished"
        assert len((await stand.client.generate(PROMPT, sampling={"max_tokens": 4})).ids) == 4
