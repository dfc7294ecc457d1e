"""How a call's messages are read: inflated, parsed, and of a unary call waited for, for so long.

Stands innermost, so that a call whose message has not come yet is counted and checked like any other.

| a message that cannot be read, or none where one must come  | INVALID_ARGUMENT   |
| one that inflates to more than a message may have           | RESOURCE_EXHAUSTED |
| a unary call's that has not come after MESSAGE_SECONDS      | DEADLINE_EXCEEDED  |
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common import logs
from common.errors import DeadlineExceeded, InvalidArgument
from common.rpc.compression import inflated
from common.rpc.handlers import Behavior, Context, HandlerInterceptor, rewrap

GONE_SECONDS = 0.05
MESSAGE_SECONDS = 120.0
"""How long the message of a unary call may take to arrive; the largest does over a slow line. Who calls and says nothing would
else hold the call open."""
END: Any = grpc.aio.EOF


class MessageInterceptor(HandlerInterceptor):
    """Makes every handler one of a stream of requests, which a unary one is given the only message of."""

    def __init__(self, *, max_message_bytes: int) -> None:
        """max_message_bytes: of a request, inflated."""
        super().__init__()
        self._max_message_bytes = max_message_bytes

    def wrap(self, handler: Any, method: str) -> Any:
        parse = _deserializer(handler, max_bytes=self._max_message_bytes)
        if handler.request_streaming:
            return rewrap(handler, lambda behavior: behavior, deserializer=parse)
        return rewrap(handler, _of_only_message, deserializer=parse, reads=True)


def _deserializer(handler: Any, *, max_bytes: int) -> Callable[[bytes], Any] | None:
    """The handler's own, after inflating. Bytes that are no such message become INVALID_ARGUMENT, for whoever reads them; grpc
    itself would say UNKNOWN and log a traceback. A handler that takes plain bytes gets them as they have come."""
    if (read := handler.request_deserializer) is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return read(inflated(data, max_bytes=max_bytes))
        except (DecodeError, ValueError) as error:
            raise InvalidArgument(f"the message cannot be read: {error}") from None

    return deserialize


def _of_only_message(behavior: Behavior) -> Behavior:
    if inspect.isasyncgenfunction(behavior):

        async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior(await _only_message(context), context)) as responses:
                async for response in responses:
                    yield response

        return generate

    async def answer(requests: Any, context: Context) -> Any:
        return await behavior(await _only_message(context), context)

    return answer


async def _only_message(context: Context) -> Any:
    """grpc itself would leave a call that ends without one unanswered until its client goes."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            message = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the call's message must come within {MESSAGE_SECONDS:g} s, and has not") from None
    if message is END:
        # It reads the same when the client has gone; then this task is being cancelled.
        await asyncio.sleep(GONE_SECONDS)
        raise InvalidArgument("the call must have a message, and ended without")
    if request_id := getattr(message, "request_id", ""):
        logs.bind(logs.About(request_id))
    return message
