"""What a client may ask for, and what it hears when it may not: all fields but the prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from common.core import SamplingParams
from common.errors import PdserveError, Unimplemented
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from router.request.valid_request import Limits, TextPrompt, ValidRequest
from router.request.validation import validate
from tests.helpers.eventually import once_below
from tests.helpers.validating import LIMITS, chat, refusal, request, valid

pytestmark = pytest.mark.unit


def test_an_empty_message_but_for_the_prompt_means_the_defaults() -> None:
    got = validate(pb2.GenerateRequest(text="hi"), LIMITS)
    assert got == ValidRequest(
        request_id="", prompt=TextPrompt("hi"), sampling=SamplingParams(), max_tokens_given=False, stop=(), include_stop=False,
        logprobs=None, n=1, priority=0, include_special_tokens=False, ids_only=False,
    )  # fmt: skip


def test_every_field_arrives() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, ignore_eos=True, max_tokens=9, min_p=0.125, repetition_penalty=1.5,
        frequency_penalty=-2.0, presence_penalty=2.0, seed=2**64 - 1, min_tokens=3, stop_token_ids=(5, 999),
        logit_bias={7: -100.0},
    )  # fmt: skip
    got = valid(
        request_id="r", sampling=asdict(params), stop=["a", "b"], include_stop=True, logprobs=20, n=16, priority=-5,
        include_special_tokens=True,
    )  # fmt: skip
    assert got.sampling == params
    assert (got.request_id, got.stop, got.include_stop, got.logprobs, got.n) == ("r", ("a", "b"), True, 20, 16)
    assert (got.priority, got.include_special_tokens, got.max_tokens_given) == (-5, True, True)


def test_max_tokens_given_as_its_default_differs_from_unset() -> None:
    assert valid(sampling={"max_tokens": 1024}).max_tokens_given
    assert not valid(sampling={}).max_tokens_given
    assert valid(sampling={"max_tokens": 2**32 - 1}).sampling.max_tokens == 2**32 - 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -3e38])
def test_val_05_a_float_that_is_no_number_or_far_out_is_refused_by_name(name: str, value: float) -> None:
    assert refusal(request(sampling={name: value})).startswith(f"{name} must be in ")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -0.5}, "temperature must be in [0, 100], got -0.5"),
        ({"temperature": 100.1}, "temperature must be in [0, 100], got 100.1"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"top_p": 1.0000002}, "top_p must be in (0, 1], got 1.0000002"),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1"),
        ({"min_p": -1e-30}, "min_p must be in [0, 1], got -1e-30"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in [0.001, 10000], got 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be in [0.001, 10000], got -1.0"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be in [-2, 2], got 2.5"),
        ({"presence_penalty": -2.1}, "presence_penalty must be in [-2, 2], got -2.1"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"top_k": -(2**31)}, "top_k must be at least -1, got -2147483648"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": 1025}, "min_tokens must be at most max_tokens (1024), got 1025"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens (4), got 5"),
        ({"min_tokens": 2**32 - 1}, "min_tokens must be at most max_tokens (1024), got 4294967295"),
    ],
)
def test_a_sampling_field_out_of_its_range_is_refused_with_rule_and_value(sampling: dict[str, Any], message: str) -> None:
    assert refusal(request(sampling=sampling)) == message


@pytest.mark.parametrize(("given", "kept"), [(-1, -1), (0, 0), (1, 1), (1000, 1000), (1001, 1000), (2**31 - 1, 1000)])
def test_smp_05_top_k_is_off_exact_or_cut_to_the_vocabulary(given: int, kept: int) -> None:
    assert valid(sampling={"top_k": given}).sampling.top_k == kept


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-8, 1e-45, 0.0, 100.0])
def test_smp_02_any_small_temperature_is_fine(temperature: float) -> None:
    assert valid(sampling={"temperature": temperature}).sampling.temperature == pytest.approx(temperature, rel=1e-6)


@pytest.mark.parametrize("top_p", [1e-45, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, 50])
def test_smp_10_temperature_zero_goes_with_every_filter(top_p: float, top_k: int) -> None:
    assert valid(sampling={"temperature": 0.0, "top_p": top_p, "top_k": top_k}).sampling.temperature == 0.0


@pytest.mark.parametrize(("ids", "position", "given"), [([1005], 0, 1005), ([7, -3], 1, 4294967293), ([7, 999, 1000], 2, 1000)])
def test_val_03_a_stop_token_outside_the_vocabulary_is_refused(ids: list[int], position: int, given: int) -> None:
    message = refusal(request(sampling={"stop_token_ids": [token_id % 2**32 for token_id in ids]}))
    assert message == f"stop_token_ids[{position}] must be in [0, 1000), the vocabulary size being 1000, got {given}"


def test_doubled_stops_count_once() -> None:
    got = valid(stop=["a", "b", "a"], sampling={"stop_token_ids": [3, 4, 3]})
    assert got.stop == ("a", "b") and got.sampling.stop_token_ids == (3, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 100.5, -101.0])
def test_a_bias_that_is_no_number_or_too_large_is_refused(value: float) -> None:
    assert refusal(request(sampling={"logit_bias": {3: value}})).startswith("logit_bias[3] must be in [-100, 100], got ")


@pytest.mark.parametrize("token_id", [1000, 2**32 - 1])
def test_a_bias_outside_the_vocabulary_is_refused(token_id: int) -> None:
    message = refusal(request(sampling={"logit_bias": {token_id: 1.0}}))
    assert message == f"logit_bias token id must be in [0, 1000), the vocabulary size being 1000, got {token_id}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", ""]}, "stop[1] must not be empty, got ''"),
        ({"stop": ["x"], "ids_only": True}, "stop must be empty with ids_only, which makes no text to look in, got 1"),
        ({"stop": ["ok", "é" * 513]}, "stop[1] must be at most 1024 bytes, got 1026"),
        ({"stop": list("abcdefghijklmnopq")}, "stop must have at most 16 entries, got 17"),
        ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ({"n": 17}, "n must be at most 16, got 17"),
        ({"n": 2**32 - 1}, "n must be at most 16, got 4294967295"),
        ({"request_id": "é" * 129}, "request_id must be at most 256 bytes, got 258"),
    ],
)
def test_a_field_out_of_its_range_is_refused_with_rule_and_value(fields: dict[str, Any], message: str) -> None:
    assert refusal(request(**fields)) == message


def test_the_largest_allowed_values_pass() -> None:
    got = valid(
        request_id="é" * 128, stop=["é" * 512] + list("abcdefghijklmno"), n=16, logprobs=20,
        sampling={"stop_token_ids": list(range(64)), "logit_bias": dict.fromkeys(range(1000), 100.0), "min_tokens": 1024},
    )  # fmt: skip
    assert len(got.stop) == 16


def test_logprobs_beyond_a_small_vocabulary_are_cut_to_it() -> None:
    assert validate(request(logprobs=20), Limits(vocab_size=8, max_context=64)).logprobs == 8
    assert valid(logprobs=0).logprobs == 0


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar"])
def test_constrained_output_is_not_offered_even_when_empty(name: str) -> None:
    with pytest.raises(Unimplemented, match=f"{name} is not offered"):
        valid(**{name: ""})


HUGE: list[tuple[str, Callable[[], pb2.GenerateRequest]]] = [
    ("stop must have at most 16 entries, got 500000", lambda: request(stop=["x"] * 500_000)),
    ("stop[0] must be at most 1024 bytes, got 1000000", lambda: request(stop=["x" * 1_000_000])),
    (
        "logit_bias must have at most 1024 entries, got 100000",
        lambda: request(sampling={"logit_bias": dict.fromkeys(range(100_000), 1.0)}),
    ),
    ("stop_token_ids must have at most 64 entries, got 500000", lambda: request(sampling={"stop_token_ids": [1] * 500_000})),
    ("logprobs must be at most 20, got 49152", lambda: request(logprobs=49152)),
    ("n must be at most 16, got 10000", lambda: request(n=10_000)),
    ("request_id must be at most 256 bytes, got 1000000", lambda: request(request_id="x" * 1_000_000)),
    (
        "token_ids must have at most 63 tokens (the context of 64 less one), got 1200000",
        lambda: request(token_ids=pb2.TokenIds(ids=[5] * 1_200_000)),
    ),
    (
        "chat.template_kwargs_json must be at most 262144 bytes, got 4000009",
        lambda: request(chat=chat(("user", ""), kwargs='{"a":[' + "1," * 2_000_000 + "1]}")),
    ),
    (
        "chat.messages must have at most 63 messages, a prompt's limit in tokens, got 200000",
        lambda: request(chat=chat(*[("user", "")] * 200_000)),
    ),
]


@pytest.mark.parametrize(("message", "make"), HUGE, ids=[message.split()[0] for message, _ in HUGE])
async def test_cap_07_few_bytes_of_much_work_are_refused_at_once(message: str, make: Callable[[], pb2.GenerateRequest]) -> None:
    pb = make()

    async def duration() -> float:
        started = time.perf_counter()
        with pytest.raises(PdserveError) as caught:
            validate(pb, LIMITS)
        assert str(caught.value) == message
        return time.perf_counter() - started

    await once_below(0.1, duration)
