"""From an exception in a handler to the call's status, in one place; each is logged once, of very many the rest of a second in
one line (common/rpc/refusal_log.py).

| raised                         | status                    | logged              |
| a PdserveError                 | its own, with its text [1]| one line            |
| CancelledError, client gone    | (nobody listens)          | nothing             |
| CancelledError, ours           | UNAVAILABLE               | at debug level      |
| an answer too large to send    | RESOURCE_EXHAUSTED        | one line            |
| a message that cannot be read  | INVALID_ARGUMENT          | one line            |
| one that inflates to too much  | RESOURCE_EXHAUSTED        | one line            |
| grpc's, of a call that ended   | (nobody listens)          | nothing             |
| anything else                  | INTERNAL "internal error" | with its traceback  |

[1] and when to try again, if it says so (common/rpc/retry_info.py)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message

from common import logs
from common.errors import LEAVING_METADATA, InvalidArgument, Leaving, PdserveError, ResourceExhausted
from common.rpc.compression import inflated
from common.rpc.handlers import rewrap
from common.rpc.refusal_log import RefusalLog
from common.rpc.retry_info import status_of

# A status message travels in a header, and peers refuse headers beyond some KiB.
MAX_MESSAGE_CHARS = 1000

log = logging.getLogger(__name__)
_refusals = RefusalLog(log)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler, unary or streaming, coroutine or async generator."""

    def __init__(self, *, max_message_bytes: int) -> None:
        """max_message_bytes: of a request, inflated, and of an answer; grpc itself would end a larger answer with a traceback."""
        self._max_message_bytes = max_message_bytes
        self._guarded: dict[str, tuple[Any, Any]] = {}
        """By method: the handler last seen, which is the same for every call unless something within wraps it anew, and ours."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, limit = handler_call_details.method, self._max_message_bytes
        seen, guarded = self._guarded.get(method, (None, None))
        if seen is not handler:
            read = _deserializer(handler, max_bytes=limit)
            guarded = rewrap(handler, lambda behavior: _guard(behavior, method, limit), deserializer=read)
            self._guarded[method] = handler, guarded
        return guarded


class _Malformed:
    """In place of a unary request that cannot be read."""

    def __init__(self, error: PdserveError) -> None:
        self.error = error


def _deserializer(handler: Any, *, max_bytes: int) -> Callable[[bytes], Any] | None:
    """The handler's own, after inflating. Bytes that are no such message become INVALID_ARGUMENT; grpc itself would say UNKNOWN
    and log a traceback. A stream's reader meets the error as it reads; a unary call has no reader, so its guard is given it.
    A handler that takes plain bytes gets them as they have come."""
    if (read := handler.request_deserializer) is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return read(inflated(data, max_bytes=max_bytes))
        except PdserveError as error:
            unread: PdserveError = error
        except (DecodeError, ValueError) as error:
            unread = InvalidArgument(f"the message cannot be read: {error}")
        if handler.request_streaming:
            raise unread
        return _Malformed(unread)

    return deserialize


def _guard(behavior: Callable[..., Any], method: str, max_message_bytes: int) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                _check(request)
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield _sendable(response, max_message_bytes)
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                await _end(context, error, method, request)

        return generate

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            _check(request)
            return _sendable(await behavior(request, context), max_message_bytes)
        except grpc.aio.AbortError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, method, request)

    return answer


def _sendable(response: Any, max_message_bytes: int) -> Any:
    """A response that fits a message; None of a coroutine that has written its responses itself."""
    size = response.ByteSize() if isinstance(response, Message) else len(response or b"")
    if size > max_message_bytes:
        raise ResourceExhausted(f"the answer has {size} bytes, the limit is {max_message_bytes} (--max-message-mb)")
    return response


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise request.error


async def _end(context: grpc.aio.ServicerContext[Any, Any], error: BaseException, method: str, request: Any) -> NoReturn:
    """Ends the call with the error's status; raises what tells grpc that it has ended."""
    # What the handler has bound is said anyway, and knows more.
    extra = {} if logs.is_bound() else logs.about(getattr(request, "request_id", ""))
    if isinstance(error, asyncio.CancelledError):
        if context.cancelled() or context.done():
            raise error
        # grpc leaves the client waiting for ever when a handler ends in a cancellation that the client did not ask for (GRP-02).
        log.debug("%s was cancelled by the server", method, extra=extra)
        await _abort(context, error, grpc.StatusCode.UNAVAILABLE, "the server gave up this call")
    if isinstance(error, grpc.aio.InternalError):
        # A write that met the end of its call: the deadline passed or the client went before we were told (CAN-10).
        raise asyncio.CancelledError("the call has ended already") from error
    if isinstance(error, PdserveError):
        _refusals.note(method, error.status, _shortened(error.log_text), extra=extra)
        await _abort(context, error, error.status, _shortened(str(error)), retry_after=error.retry_after)
    log.error("%s failed", method, exc_info=error, extra=extra)
    await _abort(context, error, grpc.StatusCode.INTERNAL, "internal error")


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: BaseException,
    code: grpc.StatusCode,
    text: str,
    *,
    retry_after: timedelta | None = None,
) -> NoReturn:
    """Aborts the call; one that has ended meanwhile (its deadline passed) has nobody left to tell (CAN-10)."""
    details = () if retry_after is None else status_of(code, text, retry_after).trailing_metadata
    try:
        await context.abort(code, text, (*details, LEAVING_METADATA) if isinstance(error, Leaving) else details)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as gone:
        raise asyncio.CancelledError("the call has ended already") from gone
    raise AssertionError("abort always raises") from error


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
