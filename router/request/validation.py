"""GenerateRequest -> ValidRequest: every field's rule, cheap ones first, nothing tokenized.

Pure. A broken rule is InvalidRequest (OutOfRange for a length beyond this deployment's limit) naming field, rule and given
value. Lists are counted before they are read, so that a huge one costs nothing. Token ids are uint32 on the wire: a
client's -1 arrives as 4294967295 and breaks the vocabulary rule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from common.core import SamplingParams
from common.errors import InvalidRequest, OutOfRange, Unimplemented
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from router.request import rules
from router.request.valid_request import (
    MAX_BIAS,
    MAX_ID_BYTES,
    MAX_KWARGS_BYTES,
    MAX_LISTED,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_BYTES,
    MAX_STOP_TOKENS,
    ROLES,
    ChatPrompt,
    IdsPrompt,
    Limits,
    Prompt,
    TextPrompt,
    ValidRequest,
)

__all__ = ["ChatPrompt", "IdsPrompt", "Limits", "Prompt", "TextPrompt", "ValidRequest", "check_prompt", "validate"]


def validate(pb: pb2.GenerateRequest, limits: Limits) -> ValidRequest:
    """Raises InvalidRequest, OutOfRange or Unimplemented for the first rule that does not hold."""
    if (name := pb.WhichOneof("format")) is not None:
        raise Unimplemented(f"{name} is not offered by this version")
    return ValidRequest(
        request_id=rules.check_bytes("request_id", pb.request_id, MAX_ID_BYTES),
        n=rules.check_at_most("n", pb.n, MAX_N) or 1,
        logprobs=_logprobs(pb, limits),
        stop=_stop(pb),
        sampling=_sampling(pb.sampling, limits),
        prompt=_prompt(pb, limits),
        max_tokens_given=pb.sampling.HasField("max_tokens"),
        include_stop=pb.include_stop,
        priority=pb.priority,
        include_special_tokens=pb.include_special_tokens,
        ids_only=pb.ids_only,
    )


def validate_tokenize(pb: pb2.TokenizeRequest, limits: Limits) -> TextPrompt | ChatPrompt:
    """The prompt's rules as in validate; it may be longer than a request's."""
    match pb.WhichOneof("prompt"):
        case "text":
            return _text(pb.text)
        case "chat":
            return _chat(pb.chat, limits)
        case _:
            raise InvalidRequest("prompt", "must be one of text, chat", None)


def validate_detokenize(pb: pb2.DetokenizeRequest, limits: Limits) -> list[int]:
    """The ids, each in the vocabulary; none are fine."""
    rules.check_entries("token_ids", pb.token_ids, MAX_LISTED)
    ids = list(pb.token_ids)  # Read faster than the message is.
    rules.check_ids("token_ids", ids, vocab_size=limits.vocab_size)
    return ids


def check_prompt(ids: Sequence[int], limits: Limits, *, field: str = "prompt") -> None:
    """The rules of a tokenized prompt: not empty, not longer than max_prompt_tokens, every id in the vocabulary."""
    if not ids:
        raise InvalidRequest(field, "must have at least one token", [])
    limits.prompt_length.check(len(ids), field=field)
    rules.check_ids(field, ids, vocab_size=limits.vocab_size)


def _logprobs(pb: pb2.GenerateRequest, limits: Limits) -> int | None:
    if not pb.HasField("logprobs"):
        return None
    return min(rules.check_at_most("logprobs", pb.logprobs, MAX_LOGPROBS), limits.vocab_size)


def _stop(pb: pb2.GenerateRequest) -> tuple[str, ...]:
    rules.check_entries("stop", pb.stop, MAX_STOP)
    if pb.stop and pb.ids_only:
        raise InvalidRequest("stop", "must be empty with ids_only, which makes no text to look in", len(pb.stop))
    for i, text in enumerate(pb.stop):
        if not text:
            raise InvalidRequest(f"stop[{i}]", "must not be empty", text)
        rules.check_bytes(f"stop[{i}]", text, MAX_STOP_BYTES)
    return tuple(dict.fromkeys(pb.stop))


def _sampling(pb: pb2.SamplingParams, limits: Limits) -> SamplingParams:
    floats = {name: rule.check(name, getattr(pb, name)) for name, rule in rules.FLOATS.items() if pb.HasField(name)}
    max_tokens = rules.check_at_least("max_tokens", pb.max_tokens, 1) if pb.HasField("max_tokens") else SamplingParams.max_tokens
    if pb.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"must be at most max_tokens ({max_tokens})", pb.min_tokens)
    return SamplingParams(
        **floats,
        top_k=_top_k(pb, limits),
        ignore_eos=pb.ignore_eos,
        max_tokens=max_tokens,
        seed=pb.seed if pb.HasField("seed") else None,
        min_tokens=pb.min_tokens,
        stop_token_ids=_stop_token_ids(pb, limits),
        logit_bias=_logit_bias(pb, limits),
    )


def _top_k(pb: pb2.SamplingParams, limits: Limits) -> int:
    """Above the vocabulary means the whole of it."""
    if not pb.HasField("top_k"):
        return SamplingParams.top_k
    return min(rules.check_at_least("top_k", pb.top_k, -1), limits.vocab_size)


def _stop_token_ids(pb: pb2.SamplingParams, limits: Limits) -> tuple[int, ...]:
    rules.check_entries("stop_token_ids", pb.stop_token_ids, MAX_STOP_TOKENS)
    rules.check_ids("stop_token_ids", pb.stop_token_ids, vocab_size=limits.vocab_size)
    return tuple(dict.fromkeys(pb.stop_token_ids))


def _logit_bias(pb: pb2.SamplingParams, limits: Limits) -> dict[int, float]:
    rules.check_entries("logit_bias", pb.logit_bias, MAX_BIAS)
    for token_id, value in pb.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise InvalidRequest("logit_bias token id", rules.vocab_rule(limits.vocab_size), token_id)
        rules.BIAS.check(f"logit_bias[{token_id}]", value)
    return dict(pb.logit_bias)


def _prompt(pb: pb2.GenerateRequest, limits: Limits) -> Prompt:
    match pb.WhichOneof("prompt"):
        case "text":
            return _text(pb.text)
        case "token_ids":
            return IdsPrompt(_token_ids(pb.token_ids.ids, limits))
        case "chat":
            return _chat(pb.chat, limits)
        case _:
            raise InvalidRequest("prompt", "must be one of text, token_ids, chat", None)


def _token_ids(given: Sequence[int], limits: Limits) -> list[int]:
    limits.prompt_length.check(len(given), field="token_ids")
    ids = list(given)  # Read faster than the message is.
    check_prompt(ids, limits, field="token_ids")
    return ids


def _text(text: str) -> TextPrompt:
    if not text:
        raise InvalidRequest("text", "must not be empty", text)
    return TextPrompt(text)


def _chat(pb: pb2.Chat, limits: Limits) -> ChatPrompt:
    if not pb.messages:
        raise InvalidRequest("chat.messages", "must have at least one message", [])
    if len(pb.messages) > limits.max_prompt_tokens:
        # Each takes a token at the least: told before a template runs over a million of them.
        rule = f"must have at most {limits.max_prompt_tokens} messages, a prompt's limit in tokens"
        raise OutOfRange("chat.messages", rule, len(pb.messages))
    for i, message in enumerate(pb.messages):
        if message.role not in ROLES:
            shown = message.role[: rules.SHOWN]
            raise InvalidRequest(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}", shown)
    messages = [{"role": message.role, "content": message.content} for message in pb.messages]
    return ChatPrompt(messages, _template_kwargs(pb.template_kwargs_json))


def _template_kwargs(given: str) -> dict[str, Any]:
    field, shown = "chat.template_kwargs_json", given[: rules.SHOWN]
    rules.check_bytes(field, given, MAX_KWARGS_BYTES)
    try:
        kwargs = json.loads(given, parse_constant=_no_number) if given else {}
    except (ValueError, RecursionError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise InvalidRequest(field, "must be a JSON object", shown)
    if "messages" in kwargs:
        raise InvalidRequest(field, 'must not have "messages": they have a field of their own', shown)
    if "\\u" in given and not _is_unicode(kwargs):
        raise InvalidRequest(field, "must be valid Unicode, without lone surrogates", shown)
    return kwargs


def _no_number(name: str) -> NoReturn:
    """NaN, Infinity, -Infinity: Python reads them, JSON has none."""
    raise ValueError(name)


def _is_unicode(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
