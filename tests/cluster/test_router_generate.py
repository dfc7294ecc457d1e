"""The router between a gRPC client and fake workers: what a Generate call says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.helpers.fake_workers import expected_output
from tests.helpers.router_stand import RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
async def stand(tiny: Path) -> AsyncIterator[RouterStand]:
    async with RouterStand(tiny) as running:
        yield running


async def test_a_request_streams_started_then_tokens_in_order_then_finished(stand: RouterStand) -> None:
    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 20, "ignore_eos": True})

    assert answer.ids == expected_output(PROMPT, 20)
    assert answer.reason == "LENGTH"
    assert answer.started is not None
    assert (answer.started.prefill_worker, answer.started.decode_worker) == ("prefill-0", "decode-0")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)
    assert len(answer.request_id) > 8
