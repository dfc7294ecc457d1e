"""RPC handlers with something around them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any

import grpc

Behavior = Callable[..., Any]
Context = grpc.aio.ServicerContext[Any, Any]


_SAME: Any = object()


def rewrap(
    handler: Any,
    wrap: Callable[[Behavior], Behavior],
    *,
    deserializer: Callable[[bytes], Any] | None = _SAME,
    reads: bool = False,
) -> Any:
    """A handler of the same kind around wrap(its behavior). deserializer: another one for requests; None: bytes as they are.
    reads: what wrap gives is handed the stream of requests also of a unary call."""
    answers = "stream" if handler.response_streaming else "unary"
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{answers}"
    make = getattr(grpc, f"{f'stream_{answers}' if reads else kind}_rpc_method_handler")
    return make(
        wrap(getattr(handler, kind)),
        request_deserializer=handler.request_deserializer if deserializer is _SAME else deserializer,
        response_serializer=handler.response_serializer,
    )


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler there is, anew only when what is within has changed."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        """By method: the handler last seen, which is the same for every call unless something within wraps it anew, and ours."""

    def wrap(self, handler: Any, method: str) -> Any:
        """What is to be called instead."""
        raise NotImplementedError

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        seen, wrapped = self._wrapped.get(method, (None, None))
        if seen is not handler:
            wrapped = self.wrap(handler, method)
            self._wrapped[method] = handler, wrapped
        return wrapped


def within(behavior: Behavior, scope: Callable[[Context], AbstractContextManager[object]]) -> Behavior:
    """The behavior, coroutine or async generator, inside scope(context)."""
    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            with scope(context):
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response

        return generate

    async def answer(request: Any, context: Context) -> Any:
        with scope(context):
            return await behavior(request, context)

    return answer
