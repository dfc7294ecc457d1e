"""Counts, reasons and logprobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt
from tests.helpers.successor_model import VOCAB, make_successor_model

pytestmark = pytest.mark.cluster


async def test_usg_01_eos_exactly_at_max_tokens_is_a_stop_without_its_text(tmp_path: Path) -> None:
    end = VOCAB - 1
    model = make_successor_model(tmp_path / "model", lambda t: t + 1 if t < 70 else end)
    with Cluster(tmp_path, model, worker_args=["--pool-pages", "32"]) as cluster:
        async with cluster.client() as client:
            for max_tokens in (6, 16):
                answer = await client.generate([65], sampling={"max_tokens": max_tokens})
                assert answer.ids == [66, 67, 68, 69, 70, end] and answer.reason == "STOP"
                assert "im_end" not in answer.text and answer.usage.completion_tokens == 6
            visible = await client.generate([65], sampling={"max_tokens": 6}, include_special_tokens=True)
            assert visible.ids[-1] == end and "im_end" not in visible.text, "the token that ends the output has no text"
            await cluster.assert_idle(client)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17, 64])
async def test_usg_02_completion_tokens_equal_the_tokens_delivered(client: Client, tiny: Path, max_tokens: int) -> None:
    ids = prompt(13)
    answer = await client.generate(ids, sampling={"max_tokens": max_tokens, "ignore_eos": True})
    assert len(answer.ids) == max_tokens == answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == len(ids) and answer.reason == "LENGTH"
    assert answer.ids == reference.greedy(tiny, ids, max_tokens)


async def test_usg_04_each_token_has_its_own_alternatives(client: Client, tiny: Path) -> None:
    ids = prompt(15)
    answers = await asyncio.gather(
        client.generate(ids, logprobs=5, sampling={"max_tokens": 24, "ignore_eos": True}),
        client.generate(ids, logprobs=5, sampling={"max_tokens": 24, "ignore_eos": True}, stop=["never in the text"]),
        client.generate(ids, logprobs=0, sampling={"max_tokens": 24, "ignore_eos": True}),
    )
    expected = torch.log_softmax(reference.logits(tiny, ids + answers[0].ids)[len(ids) - 1 : -1], dim=-1)
    for answer in answers:
        assert [entry.token_id for entry in answer.only.logprobs] == answer.ids
        for position, entry in enumerate(answer.only.logprobs):
            assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
    for answer in answers[:2]:
        for position, entry in enumerate(answer.only.logprobs):
            best = expected[position].topk(5)
            assert [top.token_id for top in entry.top] == best.indices.tolist()
            assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert entry.top[0].token_id == entry.token_id
    assert not answers[2].only.logprobs[0].top


async def test_usg_06_there_is_no_field_that_could_ask_for_prompt_logprobs() -> None:
    from common.rpc.gen.pdserve.v1 import generation_pb2 as pb

    names = [field.name for field in pb.GenerateRequest.DESCRIPTOR.fields]
    assert "logprobs" in names and not [name for name in names if "prompt_logprob" in name]


async def test_no_logprobs_unless_asked_for(client: Client) -> None:
    answer = await client.generate(prompt(5), sampling={"max_tokens": 3})
    assert not answer.only.logprobs


async def test_timing_adds_up(client: Client) -> None:
    async def prefill_is_seen() -> bool:
        answer = await client.generate(prompt(30), sampling={"max_tokens": 20, "ignore_eos": True})
        timing = answer.only.end.timing
        assert timing.queue_ms >= 0 and timing.handoff_ms >= 0 and timing.attempts == 1
        assert timing.queue_ms + timing.prefill_ms <= timing.ttft_ms + 1 and timing.ttft_ms < timing.total_ms
        # 0 when the first token, by another stream, was faster than the word that prefill had begun.
        return timing.prefill_ms > 0

    await eventually(prefill_is_seen, within=5)


async def test_started_names_the_workers_and_the_prompt(cluster: Cluster, client: Client) -> None:
    ids = prompt(40, seed=99)
    await client.flush()
    answer = await client.generate(ids, sampling={"max_tokens": 2, "ignore_eos": True})
    started = answer.started
    assert started is not None and started.prompt_tokens == 40 and started.cached_tokens == 0
    workers = await client.workers()
    assert workers[started.prefill_worker].role == "prefill" and workers[started.decode_worker].role == "decode"

    async def is_warm() -> bool:
        """A prompt is cached once its prefill worker has let go of it."""
        warm = await client.generate(ids, sampling={"max_tokens": 1})
        assert warm.started is not None and not warm.started.decode_worker, "a single token needs no decode worker"
        return warm.started.cached_tokens == 36 == warm.usage.cached_tokens

    await eventually(is_warm, within=5)
