"""The router between a gRPC client and fake workers: what a Generate call says when nothing goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from router.text.tokenizer import Tokenizer
from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import MAX_CONTEXT, PAGE_SIZE, RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
async def stand(tiny: Path) -> AsyncIterator[RouterStand]:
    async with RouterStand(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(ModelDir.open(tiny))


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, include_special=False)


async def test_a_request_streams_started_then_tokens_in_order_then_finished(stand: RouterStand, tokenizer: Tokenizer) -> None:
    stand.prefill[0]._cached_tokens = 3

    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 20, "ignore_eos": True})

    assert answer.ids == expected_output(PROMPT, 20)
    assert answer.text == text_of(tokenizer, answer.ids)
    assert answer.reason == "LENGTH"
    assert answer.started is not None
    assert (answer.started.prefill_worker, answer.started.decode_worker) == ("prefill-0", "decode-0")
    assert (answer.started.prompt_tokens, answer.started.cached_tokens) == (5, 3)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (5, 20, 3)
    assert len(answer.request_id) > 8


async def test_timing_adds_up_as_the_router_saw_it(stand: RouterStand) -> None:
    timing = (await stand.client.generate(PROMPT, sampling={"max_tokens": 20})).only.end.timing

    assert timing.attempts == 1
    assert 0 < timing.ttft_ms < timing.total_ms
    assert min(timing.queue_ms, timing.prefill_ms, timing.handoff_ms) >= 0
    assert timing.queue_ms + timing.prefill_ms <= timing.ttft_ms + 1


async def test_the_wire_request_is_fully_resolved(stand: RouterStand) -> None:
    sampling = {"max_tokens": 7, "temperature": 0.5, "min_tokens": 2}
    await stand.client.generate(PROMPT, sampling=sampling, request_id="mine", priority=3, timeout=20)

    (submit,) = stand.prefill[0].submits
    req = submit.req
    assert (submit.decode_address, submit.decode_worker) == (stand.decode[0].address, "decode-0")
    assert (req.request_id, req.priority, req.n, req.completion, req.prompt_len, req.output_len) == ("mine", 3, 1, 0, 5, 7)
    assert 15_000 < req.deadline_ms <= 20_500  # A deadline travels rounded up.
    assert req.sampling.HasField("seed") and req.sampling.HasField("top_p") and req.sampling.max_tokens == 7


async def test_a_drawn_seed_differs_and_a_given_one_is_kept_smp_12(stand: RouterStand) -> None:
    for sampling in ({"max_tokens": 1}, {"max_tokens": 1}, {"max_tokens": 1, "seed": 2**64 - 1}):
        await stand.client.generate(PROMPT, sampling=sampling)

    seeds = [submit.req.sampling.seed for submit in stand.prefill[0].submits]
    assert len(set(seeds)) == 3 and seeds[2] == 2**64 - 1


async def test_a_single_token_needs_no_decode_worker_hnd_02(stand: RouterStand) -> None:
    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 1, "ignore_eos": True})

    assert answer.ids == expected_output(PROMPT, 1)
    assert answer.started is not None and answer.started.decode_worker == ""
    assert stand.prefill[0].submits[0].decode_address == ""


async def test_several_completions_share_one_submission(stand: RouterStand) -> None:
    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 30, "ignore_eos": True}, n=3)

    (submit,) = stand.prefill[0].submits
    assert submit.req.n == 3
    for number, completion in answer.completions.items():
        assert completion.ids == expected_output(PROMPT, 30, number)
        assert completion.end.usage.prompt_tokens == 5


async def test_a_group_too_large_for_the_pool_is_submitted_one_by_one(tiny: Path) -> None:
    async with RouterStand(tiny, decode=0) as stand:
        await stand.add_decode(total_pages=8)
        await stand.ready()
        answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 20, "ignore_eos": True}, n=5)

        assert [submit.req.n for submit in stand.prefill[0].submits] == [1] * 5
        for number, completion in answer.completions.items():
            assert completion.ids == expected_output(PROMPT, 20, number)


async def test_a_stop_string_ends_the_output_and_the_work_str_01(stand: RouterStand, tokenizer: Tokenizer) -> None:
    full = text_of(tokenizer, expected_output(PROMPT, 300))
    stop = full[40:43]
    end = full.index(stop)

    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 300, "ignore_eos": True}, stop=["zzzz", stop])

    assert answer.text == full[:end]
    assert answer.reason == "STOP" and answer.only.end.matched_stop == stop
    assert answer.usage.completion_tokens == len(answer.ids) == end + 3
    assert stand.decode[0].cancels == [(stand.prefill[0].submits[0].req.key.uid, 1)]


async def test_a_stop_string_in_the_first_token_of_a_group_leaves_the_others_alone(
    stand: RouterStand, tokenizer: Tokenizer
) -> None:
    prefill, decode = stand.prefill[0], stand.decode[0]
    prefill.hold_commit.clear()
    first = text_of(tokenizer, expected_output(PROMPT, 1, 1))
    stream = aiter(stand.client.call(PROMPT, sampling={"max_tokens": 40, "ignore_eos": True}, n=3, stop=[first]))
    events = [await anext(stream)]
    while events[-1].WhichOneof("event") != "finished":
        events.append(await anext(stream))

    assert events[-1].index == 1 and events[-1].finished.matched_stop == first
    key = (prefill.submits[0].req.key.uid + 1, 1)
    await eventually(lambda: (prefill.cancels, decode.cancels) == ([key], [key]), within=2)
    prefill.hold_commit.set()
    events += [event async for event in stream]

    for number in (0, 2):
        text = text_of(tokenizer, expected_output(PROMPT, 40, number))
        got = "".join(event.delta.text for event in events if event.index == number)
        assert got == (text[: text.index(first)] if first in text else text)


async def test_logprobs_come_one_per_token_with_texts_usg_04(stand: RouterStand, tokenizer: Tokenizer) -> None:
    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 25, "ignore_eos": True}, logprobs=2)

    assert [entry.token_id for entry in answer.only.logprobs] == answer.ids
    for entry in answer.only.logprobs:
        assert entry.logprob == pytest.approx(-entry.token_id / 100)
        assert entry.text == tokenizer.token_text(entry.token_id)
        assert entry.top[0].token_id == entry.token_id and len(entry.top) == 2


async def test_ids_only_makes_no_text(stand: RouterStand) -> None:
    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 50, "ignore_eos": True}, ids_only=True)

    assert (answer.ids, answer.text) == (expected_output(PROMPT, 50), "")


async def test_the_fake_stop_token_is_counted_and_adds_no_text(stand: RouterStand, tokenizer: Tokenizer) -> None:
    output = expected_output(PROMPT, 30)
    stop_id = output[17]
    kept = output[: output.index(stop_id) + 1]

    answer = await stand.client.generate(PROMPT, sampling={"max_tokens": 30, "stop_token_ids": [stop_id], "ignore_eos": True})

    assert (answer.ids, answer.reason) == (kept, "STOP")
    assert answer.text == text_of(tokenizer, kept[:-1])


async def test_model_tokenize_detokenize_and_flush_answer(stand: RouterStand, tiny: Path) -> None:
    model = await stand.client.model()
    assert (model.name, model.max_context, model.max_prompt_tokens) == (tiny.name, MAX_CONTEXT, MAX_CONTEXT - 1)
    assert (model.dtype, model.page_size, model.has_chat_template) == ("float32", PAGE_SIZE, True)

    ids = (await stand.client.stub.Tokenize(pb.TokenizeRequest(text="the hat"))).token_ids
    assert (await stand.client.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "the hat"
    assert await stand.client.flush() == 7
    assert (stand.prefill[0].flushes, stand.decode[0].flushes) == (1, 1)


async def test_requests_and_tokens_are_counted(stand: RouterStand) -> None:
    await stand.client.generate(PROMPT, sampling={"max_tokens": 6, "ignore_eos": True})
    await stand.client.refusal(PROMPT, sampling={"max_tokens": 0})

    assert stand.metric("pdserve_requests_total", outcome="OK") == 1
    assert stand.metric("pdserve_requests_total", outcome="INVALID_ARGUMENT") == 1
    assert stand.metric("pdserve_tokens_total", kind="prompt") == 5
    assert stand.metric("pdserve_tokens_total", kind="output") == 6
    assert stand.metric("pdserve_refusals_total", reason="invalid_argument") == 1
    for name in ("ttft", "queue", "prefill", "handoff", "request"):
        assert stand.metric(f"pdserve_{name}_seconds_count") == 1, name
    assert stand.metric("pdserve_requests_in_flight") == stand.metric("pdserve_requests_queued") == 0
