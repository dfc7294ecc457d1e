"""What a client may send as a prompt, and what it hears when it may not."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from common.errors import InvalidRequest, OutOfRange
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from router.request.valid_request import ChatPrompt, IdsPrompt, TextPrompt
from router.request.validation import check_prompt, validate_detokenize, validate_tokenize
from tests.helpers.validating import LIMITS, chat, refusal, request, valid

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("ids", "position", "given"),
    [([-1], 0, 4294967295), ([5, -7, 9], 1, 4294967289), ([-(2**31)], 0, 2147483648), ([0, 999, 1000], 2, 1000)],
)
def test_val_01_an_id_outside_the_vocabulary_is_named_with_its_position(ids: list[int], position: int, given: int) -> None:
    prompt = pb2.TokenIds(ids=[token_id % 2**32 for token_id in ids])
    wanted = f"token_ids[{position}] must be in [0, 1000), the vocabulary size being 1000, got {given}"
    assert refusal(request(token_ids=prompt)) == wanted


@pytest.mark.parametrize(
    ("pb", "message"),
    [
        (request(text=""), "text must not be empty, got ''"),
        (request(token_ids=pb2.TokenIds()), "token_ids must have at least one token, got []"),
        (request(text=None), "prompt must be one of text, token_ids, chat, got None"),
        (request(chat=pb2.Chat()), "chat.messages must have at least one message, got []"),
    ],
)
def test_val_08_every_kind_of_empty_prompt_is_refused(pb: pb2.GenerateRequest, message: str) -> None:
    if message.startswith("text"):
        pb.text = ""
    assert refusal(pb) == message


@pytest.mark.parametrize("role", ["", "System", "developer", "x" * 10_000, "user\n"])
def test_an_unknown_role_is_refused_with_its_position(role: str) -> None:
    message = refusal(request(chat=chat(("user", "hi"), (role, "ho"))))
    assert message.startswith("chat.messages[1].role must be one of system, user, assistant, tool, got ") and len(message) < 200


def test_a_chat_arrives_with_the_templates_variables() -> None:
    got = valid(chat=chat(("system", ""), ("user", "hi"), kwargs='{"tools": [], "x": null}'))
    assert got.prompt == ChatPrompt(
        [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}], {"tools": [], "x": None}
    )


@pytest.mark.parametrize(
    "kwargs", ["{", "[]", "1", '"x"', "null", "{'a': 1}", "[" * 100_000, "9" * 10_000, "\x00", '{"messages": []}']
)
def test_template_variables_that_are_no_object_are_refused(kwargs: str) -> None:
    message = refusal(request(chat=chat(("user", "hi"), kwargs=kwargs)))
    assert message.startswith("chat.template_kwargs_json must ") and len(message) < 250


def test_bnd_01_a_prompt_over_the_context_is_refused_with_limit_and_length() -> None:
    with pytest.raises(OutOfRange) as caught:
        valid(token_ids=pb2.TokenIds(ids=[1] * 65))
    assert str(caught.value) == "token_ids must have at most 63 tokens (the context of 64 less one), got 65"
    assert caught.value.status is grpc.StatusCode.OUT_OF_RANGE


def test_bnd_02_one_less_than_the_context_is_the_longest_prompt() -> None:
    assert valid(token_ids=pb2.TokenIds(ids=[1] * 63)).prompt == IdsPrompt([1] * 63)
    with pytest.raises(OutOfRange, match="prompt must have at most 63 tokens"):
        check_prompt([1] * 64, LIMITS)
    check_prompt([1] * 63, LIMITS)


def test_a_tokenized_prompt_is_checked_for_emptiness_and_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="prompt must have at least one token"):
        check_prompt([], LIMITS)
    with pytest.raises(InvalidRequest, match=r"prompt\[2\] must be in \[0, 1000\), .* got -1"):
        check_prompt([0, 999, -1], LIMITS)


def test_more_messages_than_tokens_are_refused() -> None:
    with pytest.raises(OutOfRange, match="chat.messages must have at most 63 messages.* got 64"):
        valid(chat=chat(*[("user", "")] * 64))


def test_a_tokenize_request_follows_the_same_rules_without_a_length() -> None:
    assert validate_tokenize(pb2.TokenizeRequest(text="x" * 10_000), LIMITS) == TextPrompt("x" * 10_000)
    assert validate_tokenize(pb2.TokenizeRequest(chat=chat(("user", "hi"))), LIMITS) == ChatPrompt(
        [{"role": "user", "content": "hi"}], {}
    )
    for bad in (pb2.TokenizeRequest(), pb2.TokenizeRequest(text=""), pb2.TokenizeRequest(chat=pb2.Chat())):
        with pytest.raises(InvalidRequest):
            validate_tokenize(bad, LIMITS)


def test_ids_to_detokenize_must_be_in_the_vocabulary() -> None:
    assert validate_detokenize(pb2.DetokenizeRequest(token_ids=[0, 999]), LIMITS) == [0, 999]
    assert validate_detokenize(pb2.DetokenizeRequest(), LIMITS) == []
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\] must be in \[0, 1000\), .*got 1000"):
        validate_detokenize(pb2.DetokenizeRequest(token_ids=[3, 1000]), LIMITS)


def test_a_prompt_beyond_the_configured_cap_is_refused_naming_the_flag_and_a_shorter_one_is_not() -> None:
    capped = replace(LIMITS, prompt_cap=5)
    check_prompt([1] * 5, capped)
    with pytest.raises(OutOfRange) as caught:
        check_prompt([1] * 6, capped)
    assert str(caught.value) == "prompt must have at most 5 tokens (--max-prompt-tokens), got 6"


def test_a_cap_beyond_the_context_changes_nothing() -> None:
    capped = replace(LIMITS, prompt_cap=10**9)
    assert capped.max_prompt_tokens == LIMITS.max_context - 1
    with pytest.raises(OutOfRange, match=f"the context of {LIMITS.max_context} less one"):
        check_prompt([1] * LIMITS.max_context, capped)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_template_variables_are_json_which_has_no_such_numbers(number: str) -> None:
    message = refusal(request(chat=chat(("user", "hi"), kwargs=f'{{"x": [{number}]}}')))
    assert message.startswith("chat.template_kwargs_json must be a JSON object, got ")


def test_lone_surrogates_in_template_variables_are_refused_by_the_field_s_name() -> None:
    for kwargs in (r'{"x": ["\ud800"]}', r'{"\uDFFF": 1}', r'{"x": "\ude00\ud83d"}'):
        message = refusal(request(chat=chat(("user", "hi"), kwargs=kwargs)))
        assert message.startswith("chat.template_kwargs_json must be valid Unicode, without lone surrogates, got ")
    paired = valid(chat=chat(("user", "hi"), kwargs=r'{"x": "\ud83d\ude00"}'))
    assert isinstance(paired.prompt, ChatPrompt) and paired.prompt.kwargs == {"x": "😀"}
