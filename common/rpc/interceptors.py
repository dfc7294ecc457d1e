"""From an exception in a handler to the call's status, in one place; each is logged once, of very many the rest of a second in
one line (common/rpc/refusal_log.py).

| raised                         | status                    | logged              |
| a PdserveError                 | its own, with its text [1]| one line            |
| CancelledError, client gone    | (nobody listens)          | nothing             |
| CancelledError, ours           | UNAVAILABLE               | at debug level      |
| an answer too large to send    | RESOURCE_EXHAUSTED        | one line            |
| a message that cannot be read, | INVALID_ARGUMENT          | one line            |
|   or none where one must come  |                           |                     |
| one that inflates to too much  | RESOURCE_EXHAUSTED        | one line            |
| a unary call's that has not    | DEADLINE_EXCEEDED         | one line            |
|   come after MESSAGE_SECONDS   |                           |                     |
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
from common.errors import LEAVING_METADATA, DeadlineExceeded, InvalidArgument, Leaving, PdserveError, ResourceExhausted
from common.rpc.compression import inflated
from common.rpc.handlers import Context, rewrap
from common.rpc.refusal_log import RefusalLog
from common.rpc.retry_info import status_of

# A status message travels in a header, and peers refuse headers beyond some KiB.
MAX_MESSAGE_CHARS = 1000

GONE_SECONDS = 0.05
MESSAGE_SECONDS = 120.0
"""How long the message of a unary call may take to arrive; the largest does over a slow line. Who calls and says nothing would
else hold the call open, counted by nobody."""
END: Any = grpc.aio.EOF
log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler, unary or streaming, coroutine or async generator."""

    def __init__(self, *, max_message_bytes: int) -> None:
        """max_message_bytes: of a request, inflated, and of an answer; grpc itself would end a larger answer with a traceback."""
        self._max_message_bytes = max_message_bytes
        self._refusals = RefusalLog(log)
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
            read = _stream if handler.request_streaming else _only_message
            guarded = rewrap(
                handler,
                lambda behavior: _guard(behavior, method, limit, read=read, refusals=self._refusals),
                deserializer=_deserializer(handler, max_bytes=limit),
                reads=True,
            )
            self._guarded[method] = handler, guarded
        return guarded


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


async def _stream(requests: Any, context: Context) -> Any:
    return requests


async def _only_message(requests: Any, context: Context) -> Any:
    """Of a unary call. grpc itself would leave a call that ends without one unanswered until its client goes."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            message = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the call's message must come within {MESSAGE_SECONDS:g} s, and has not") from None
    if message is END:
        # It reads the same when the client has gone; then this task is being cancelled.
        await asyncio.sleep(GONE_SECONDS)
        raise InvalidArgument("the call must have a message, and ended without")
    return message


def _guard(
    behavior: Callable[..., Any],
    method: str,
    max_message_bytes: int,
    *,
    read: Callable[[Any, Context], Awaitable[Any]],
    refusals: RefusalLog,
) -> Callable[..., Any]:
    """read: what to hand the behavior, of a call's requests."""
    if inspect.isasyncgenfunction(behavior):

        async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
            request = None
            try:
                request = await read(requests, context)
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield _sendable(response, max_message_bytes)
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                await _end(context, error, method, request, refusals)

        return generate

    async def answer(requests: Any, context: Context) -> Any:
        request = None
        try:
            request = await read(requests, context)
            return _sendable(await behavior(request, context), max_message_bytes)
        except grpc.aio.AbortError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, method, request, refusals)

    return answer


def _sendable(response: Any, max_message_bytes: int) -> Any:
    """A response that fits a message; None of a coroutine that has written its responses itself."""
    size = response.ByteSize() if isinstance(response, Message) else len(response or b"")
    if size > max_message_bytes:
        raise ResourceExhausted(f"the answer has {size} bytes, the limit is {max_message_bytes} (--max-message-mb)")
    return response


async def _end(context: Context, error: BaseException, method: str, request: Any, refusals: RefusalLog) -> NoReturn:
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
        refusals.note(method, error.status, _shortened(error.log_text), extra=extra)
        await _abort(context, error, error.status, _shortened(str(error)), retry_after=error.retry_after)
    log.error("%s failed", method, exc_info=error, extra=extra)
    await _abort(context, error, grpc.StatusCode.INTERNAL, "internal error")


async def _abort(
    context: Context,
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
