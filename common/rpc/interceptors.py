"""From an exception in a handler to the call's status, in one place; each is logged once, of very many the rest of a second in
one line (common/rpc/refusal_log.py).

| raised                         | status                    | logged              |
| a PdserveError                 | its own, with its text [1]| one line            |
| CancelledError, client gone    | (nobody listens)          | nothing             |
| CancelledError, ours           | UNAVAILABLE               | at debug level      |
| an answer too large to send    | RESOURCE_EXHAUSTED        | one line            |
| grpc's, of a call that ended   | (nobody listens)          | nothing             |
| anything else                  | INTERNAL "internal error" | with its traceback  |

[1] and when to try again, if it says so (common/rpc/retry_info.py)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import timedelta
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from common.errors import LEAVING_METADATA, Leaving, PdserveError, ResourceExhausted
from common.rpc.handlers import Behavior, Context, HandlerInterceptor, rewrap
from common.rpc.refusal_log import RefusalLog
from common.rpc.retry_info import status_of

# A status message travels in a header, and peers refuse headers beyond some KiB.
MAX_MESSAGE_CHARS = 1000

log = logging.getLogger(__name__)


class ErrorInterceptor(HandlerInterceptor):
    """Wraps every handler, unary or streaming, coroutine or async generator."""

    def __init__(self, *, max_message_bytes: int) -> None:
        """max_message_bytes: of an answer; grpc itself would end a larger one with a traceback."""
        super().__init__()
        self._max_message_bytes = max_message_bytes
        self._refusals = RefusalLog(log)

    def wrap(self, handler: Any, method: str) -> Any:
        return rewrap(handler, lambda behavior: _guard(behavior, method, self._max_message_bytes, refusals=self._refusals))


def _guard(behavior: Behavior, method: str, max_message_bytes: int, *, refusals: RefusalLog) -> Behavior:
    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield _sendable(response, max_message_bytes)
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                await _end(context, error, method, refusals)

        return generate

    async def answer(request: Any, context: Context) -> Any:
        try:
            return _sendable(await behavior(request, context), max_message_bytes)
        except grpc.aio.AbortError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, method, refusals)

    return answer


def _sendable(response: Any, max_message_bytes: int) -> Any:
    """A response that fits a message; None of a coroutine that has written its responses itself."""
    size = response.ByteSize() if isinstance(response, Message) else len(response or b"")
    if size > max_message_bytes:
        raise ResourceExhausted(f"the answer has {size} bytes, the limit is {max_message_bytes} (--max-message-mb)")
    return response


async def _end(context: Context, error: BaseException, method: str, refusals: RefusalLog) -> NoReturn:
    """Ends the call with the error's status; raises what tells grpc that it has ended."""
    if isinstance(error, asyncio.CancelledError):
        if context.cancelled() or context.done():
            raise error
        # grpc leaves the client waiting for ever when a handler ends in a cancellation that the client did not ask for (GRP-02).
        log.debug("%s was cancelled by the server", method)
        await _abort(context, error, grpc.StatusCode.UNAVAILABLE, "the server gave up this call")
    if isinstance(error, grpc.aio.InternalError):
        # A write that met the end of its call: the deadline passed or the client went before we were told (CAN-10).
        raise asyncio.CancelledError("the call has ended already") from error
    if isinstance(error, PdserveError):
        refusals.note(method, error.status, _shortened(error.log_text))
        await _abort(context, error, error.status, _shortened(str(error)), retry_after=error.retry_after)
    log.error("%s failed", method, exc_info=error)
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
