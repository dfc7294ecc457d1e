"""Bad input: a status that names field, rule and given value; nothing scheduled, nobody else disturbed."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import psutil
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.cluster.conftest import CONTEXT
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster

INVALID = grpc.StatusCode.INVALID_ARGUMENT
VOCAB = 384
NAN, INF = math.nan, math.inf


def chat(*messages: tuple[str, str], **fields: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages], **fields)


@pytest.mark.parametrize("given", [[2**32 - 1], [5, 2**32 - 7, 9], [2**31], [VOCAB], [1, 2, VOCAB + 5]], ids=str)
async def test_val_01_ids_outside_the_vocabulary_name_position_and_vocabulary(client: Client, given: list[int]) -> None:
    code, message = await client.refusal(given)
    position = next(i for i, token in enumerate(given) if token >= VOCAB)
    assert code is INVALID and str(VOCAB) in message and str(position) in message


async def test_val_03_out_of_range_stop_tokens_hurt_nobody_else(client: Client) -> None:
    normal = [asyncio.ensure_future(client.generate(prompt(10, seed=i), sampling={"max_tokens": 30})) for i in range(10)]
    for stops in ([VOCAB + 5], [2**32 - 3], [1, VOCAB]):
        code, message = await client.refusal([1, 2], sampling={"stop_token_ids": stops})
        assert code is INVALID and "stop_token_ids" in message and str(VOCAB) in message
    await client.generate([1, 2], sampling={"stop_token_ids": [5], "max_tokens": 3})
    await asyncio.gather(*normal)


FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("field", FLOATS)
async def test_val_05_nan_and_infinity_are_refused_by_name(client: Client, field: str, value: float) -> None:
    code, message = await client.refusal([1, 2], sampling={field: value})
    assert code is INVALID and field in message and ("nan" in message or "inf" in message)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"presence_penalty": -3.0}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: NAN}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ],
    ids=str,
)
async def test_sampling_parameters_out_of_range_are_refused_by_name(client: Client, sampling: dict[str, Any], field: str) -> None:
    code, message = await client.refusal([1, 2], sampling=sampling)
    assert code is INVALID and field in message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": ["x"], "ids_only": True}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 17}, "n"),
        ({"request_id": "x" * 257}, "request_id"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_request_fields_out_of_range_are_refused_by_name(client: Client, fields: dict[str, Any], field: str) -> None:
    code, message = await client.refusal([1, 2], **fields)
    assert code is INVALID and field in message


@pytest.mark.parametrize("field", ["json_schema", "regex", "grammar"])
async def test_constrained_output_is_refused_as_not_offered(client: Client, field: str) -> None:
    code, message = await client.refusal([1, 2], **{field: "x"})
    assert code is grpc.StatusCode.UNIMPLEMENTED and field in message


async def test_val_07_a_live_request_id_is_refused_and_the_first_goes_on(client: Client) -> None:
    call = client.call(prompt(5), request_id="X", sampling={"max_tokens": 900, "ignore_eos": True})
    await first_event(call, "started")
    code, message = await client.refusal(prompt(5), request_id="X")
    assert code is grpc.StatusCode.ALREADY_EXISTS and "X" in message
    finished = await first_event(call, "finished")
    assert finished.finished.usage.completion_tokens == 900
    await asyncio.gather(*(client.generate(prompt(5), sampling={"max_tokens": 3}) for _ in range(10)))
    await client.generate(prompt(5), request_id="X", sampling={"max_tokens": 3})


@pytest.mark.parametrize("empty", ["", [], None, pb.Chat()], ids=["text", "ids", "unset", "chat"])
async def test_val_08_an_empty_prompt_is_refused_beside_running_streams(client: Client, empty: Any) -> None:
    streams = [asyncio.ensure_future(client.generate(prompt(6, seed=i), sampling={"max_tokens": 20})) for i in range(4)]
    code, message = await client.refusal(empty)
    assert code is INVALID and message
    await asyncio.gather(*streams)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (chat(("wizard", "hi")), "wizard"),
        (chat(("user", "hi"), template_kwargs_json="[1]"), "template_kwargs_json"),
        (chat(("user", "hi"), template_kwargs_json="{"), "template_kwargs_json"),
    ],
    ids=["role", "kwargs not an object", "kwargs not JSON"],
)
async def test_a_bad_chat_is_refused(client: Client, bad: pb.Chat, part: str) -> None:
    code, message = await client.refusal(bad)
    assert code is INVALID and part in message


async def test_grp_06_a_message_over_the_limit_is_resource_exhausted_and_under_it_an_ordinary_error(client: Client) -> None:
    code, message = await client.refusal("a" * (17 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and str(16 << 20) in message
    for large in ("a" * 5_000_000, [1] * 1_200_000):
        code, message = await client.refusal(large)
        assert code is grpc.StatusCode.OUT_OF_RANGE
    await client.generate([1, 2], sampling={"max_tokens": 2})


async def test_cap_07_texts_as_long_as_a_message_cost_little(cluster: Cluster, client: Client) -> None:
    router = psutil.Process(cluster.router.pid)
    before = router.memory_info().rss
    for code, message in await asyncio.gather(*(client.refusal("hello " * (2 << 20)) for _ in range(4))):
        assert code is grpc.StatusCode.OUT_OF_RANGE and f"at most {CONTEXT - 1} tokens" in message
        assert "in its first" in message and str(12 << 20) in message
    # Each is there as bytes, as a message and as a str.
    assert router.memory_info().rss - before < 4 * 60 << 20


async def test_cap_07_more_ids_than_are_listed_are_refused_by_count(client: Client) -> None:
    most = 2 << 20
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * (most + 1)), timeout=20)
    assert caught.value.code() is INVALID and "token_ids" in (caught.value.details() or "") and str(most) in str(caught.value)


async def test_abort_of_an_unknown_id_is_found_false_and_of_a_live_one_ends_it(client: Client) -> None:
    assert not (await client.stub.Abort(pb.AbortRequest(request_id="nobody"), timeout=5)).found
    call = client.call(prompt(5), request_id="Y", sampling={"max_tokens": 900, "ignore_eos": True})
    await first_event(call, "delta")
    assert (await client.stub.Abort(pb.AbortRequest(request_id="Y"), timeout=5)).found
    finished = await first_event(call, "finished")
    assert finished.finished.reason == pb.FINISH_REASON_ABORT
    assert not (await client.stub.Abort(pb.AbortRequest(request_id="Y"), timeout=5)).found
