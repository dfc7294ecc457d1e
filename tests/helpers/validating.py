"""Requests for the validation tests, by the public API's field names."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from common.errors import InvalidRequest
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from router.request.valid_request import Limits, ValidRequest
from router.request.validation import validate

LIMITS = Limits(vocab_size=1000, max_context=64)


def request(*, text: str | None = "hi", sampling: dict[str, Any] | None = None, **fields: Any) -> pb2.GenerateRequest:
    made = pb2.GenerateRequest(sampling=pb2.SamplingParams(**(sampling or {})), **fields)
    if text is not None and made.WhichOneof("prompt") is None:
        made.text = text
    return made


def chat(*messages: tuple[str, str], kwargs: str = "") -> pb2.Chat:
    return pb2.Chat(
        messages=[pb2.ChatMessage(role=role, content=content) for role, content in messages], template_kwargs_json=kwargs
    )


def valid(**fields: Any) -> ValidRequest:
    return validate(request(**fields), LIMITS)


def refusal(pb: pb2.GenerateRequest) -> str:
    """The message of the INVALID_ARGUMENT that pb meets."""
    with pytest.raises(InvalidRequest) as caught:
        validate(pb, LIMITS)
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value)
