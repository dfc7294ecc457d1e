"""Errors to statuses, over a real server, for every kind of handler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from common.errors import AlreadyExists, InvalidRequest, ResourceExhausted, Unavailable
from common.rpc import messages
from common.rpc.channels import error_of, make_channel
from common.rpc.interceptors import MAX_MESSAGE_CHARS
from common.rpc.server import bind, make_server
from tests.helpers.rpc import KINDS, LOOPBACK, SERVICE, call, serving
from tests.helpers.status_details import retry_after

Handler = Callable[[Any, Any], Any]


async def read_to_the_end(request: Any) -> None:
    """Else its client, which still writes, sees the library's own status now and then (grpc/grpc#36066)."""
    if hasattr(request, "__aiter__"):
        async for _ in request:
            pass


def returning(effect: Callable[[], Any]) -> Handler:
    """A coroutine handler."""

    async def handler(request: Any, context: Any) -> bytes:
        await read_to_the_end(request)
        await asyncio.sleep(0)
        effect()
        return b"answer"

    return handler


def generating(effect: Callable[[], Any]) -> Handler:
    """An async generator handler; the effect comes after one response."""

    async def handler(request: Any, context: Any) -> AsyncIterator[bytes]:
        await read_to_the_end(request)
        yield b"answer"
        effect()

    return handler


def writing(effect: Callable[[], Any]) -> Handler:
    """A coroutine handler of a response stream."""

    async def handler(request: Any, context: Any) -> None:
        await read_to_the_end(request)
        await context.write(b"answer")
        effect()

    return handler


def every_kind(effect: Callable[[], Any]) -> dict[str, Handler]:
    handlers = {}
    for kind in KINDS:
        if kind.endswith("_unary"):
            handlers[kind] = returning(effect)
        else:
            handlers[kind + "_generating"] = generating(effect)
            handlers[kind + "_writing"] = writing(effect)
    return handlers


NAMES = tuple(every_kind(lambda: None))


def raiser(error: BaseException) -> Callable[[], None]:
    def effect() -> None:
        raise error

    return effect


async def failure(name: str, effect: Callable[[], Any]) -> grpc.aio.AioRpcError:
    async with serving(every_kind(effect)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, name)
        return caught.value


@pytest.mark.parametrize("name", NAMES)
async def test_a_handler_that_does_not_fail_is_left_alone(name: str) -> None:
    async with serving(every_kind(lambda: None)) as channel:
        assert await call(channel, name) == [b"answer"]


@pytest.mark.parametrize("name", NAMES)
async def test_an_error_of_the_family_becomes_its_status_and_text_and_is_logged_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        error = await failure(name, raiser(InvalidRequest("top_p", "must be in (0, 1]", 1.5)))
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "top_p must be in (0, 1], got 1.5")
    assert [record.exc_info for record in caplog.records if "top_p" in record.getMessage()] == [None]


@pytest.mark.parametrize("name", ["unary_unary", "stream_unary", "unary_stream_generating"])
async def test_an_answer_larger_than_a_message_may_be_is_resource_exhausted_without_a_traceback(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    limit, handlers = 1 << 20, {"largest": 1 << 20, "larger": (1 << 20) + 1}

    def answering(size: int) -> Handler:
        async def handler(request: Any, context: Any) -> bytes:
            return b"x" * size

        async def generating(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield b"x" * size

        return generating if name.endswith("generating") else handler

    made = {f"{name}_{which}": answering(size) for which, size in handlers.items()}
    async with serving(made, max_message_bytes=limit) as channel:
        assert [len(answer) for answer in await call(channel, f"{name}_largest")] == [limit]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, f"{name}_larger")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the answer has 1048577 bytes, the limit is 1048576 (--max-message-mb)"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("name", NAMES)
async def test_any_other_exception_becomes_internal_without_its_text_and_its_traceback_is_logged_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await failure(name, raiser(KeyError("secret")))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert len([record for record in caplog.records if record.exc_info]) == 1


@pytest.mark.parametrize("name", NAMES)
async def test_grp_02_a_cancellation_from_inside_the_server_reaches_the_client_as_a_status(name: str) -> None:
    error = await failure(name, raiser(asyncio.CancelledError()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["unary_unary", "unary_stream_generating", "unary_stream_writing"])
async def test_grp_02_cancelling_the_handlers_task_inside_the_server_reaches_the_client_as_a_status(name: str) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def wait(request: Any, context: Any) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        await asyncio.sleep(60)
        return b""

    async def generating(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield await wait(request, context)

    async with serving({name: generating if name.endswith("generating") else wait}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, name)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(tasks) == 1


@pytest.mark.parametrize("name", ["unary_stream_generating", "unary_stream_writing", "unary_unary"])
async def test_a_client_that_leaves_cancels_the_handler_and_its_clean_up_runs(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    async def generating(request: Any, context: Any) -> AsyncIterator[bytes]:
        await wait()
        yield b""

    async def coroutine(request: Any, context: Any) -> bytes:
        await wait()
        return b""

    async with serving({name: generating if name.endswith("generating") else coroutine}) as channel:
        task = asyncio.create_task(call(channel, name))
        await asyncio.wait_for(started.wait(), 5)
        task.cancel()
        await asyncio.wait_for(cleaned.wait(), 5)
        await asyncio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []


async def test_a_very_long_message_is_cut_so_that_it_still_arrives_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """It may quote a name that a stranger chose, as long as a message may be."""
    caplog.set_level(logging.INFO)
    error = await failure("unary_unary", raiser(AlreadyExists("x" * 100_000)))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert len(error.details() or "") == MAX_MESSAGE_CHARS
    assert [len(record.getMessage()) < 2 * MAX_MESSAGE_CHARS for record in caplog.records] == [True]


async def test_a_message_with_line_ends_and_other_alphabets_arrives_unchanged() -> None:
    error = await failure("unary_stream_generating", raiser(AlreadyExists("schön\n数字\t%20")))
    assert error.details() == "schön\n数字\t%20"


async def test_a_handlers_own_abort_is_passed_on() -> None:
    async def refusing(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")

    async with serving({"unary_unary": refusing}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "not here")


async def test_an_unknown_method_is_unimplemented_and_a_peers_status_comes_back_as_an_error_of_the_family() -> None:
    async with serving({}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary_missing")
    assert error_of(caught.value).status is grpc.StatusCode.UNIMPLEMENTED
    error = await failure("unary_unary", raiser(AlreadyExists("request_id 'a' is in use")))
    assert isinstance(error_of(error), AlreadyExists)
    assert str(error_of(error)) == "request_id 'a' is in use"


def test_a_refusal_is_logged_without_the_text_that_it_quotes_to_the_client() -> None:
    quoted = InvalidRequest("chat", "cannot be rendered: no secret allowed", "secret", log_rule="cannot be rendered")
    assert "secret" in str(quoted) and quoted.log_text == "chat cannot be rendered"
    assert InvalidRequest("top_p", "must be in (0, 1]", 1.5).log_text == "top_p must be in (0, 1], got 1.5"
    assert Unavailable("decode-1 is gone").log_text == "decode-1 is gone"


async def test_a_refusal_that_knows_when_to_try_again_says_so_in_its_details_cap_06() -> None:
    full = ResourceExhausted("3 wait, the limit is 3", retry_after=timedelta(seconds=2, milliseconds=500))
    error = await failure("unary_unary", raiser(full))
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "3 wait, the limit is 3")
    assert retry_after(error) == timedelta(seconds=2.5)
    assert retry_after(await failure("unary_unary", raiser(ResourceExhausted("full")))) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_are_no_message_are_an_invalid_argument_and_no_traceback(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def read_all(requests: Any, context: Any) -> Any:
        return [request async for request in requests] if kind.startswith("stream") else requests

    async def read_each(requests: Any, context: Any) -> AsyncIterator[Any]:
        for request in await read_all(requests, context):
            yield request

    behavior = read_each if kind.endswith("stream") else read_all
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(behavior, health_pb2.HealthCheckRequest.FromString)
    server = make_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {kind: handler}),))
    address = await bind(server, LOOPBACK)
    await server.start()
    async with make_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, [b"\xff\xff\xff"])
    await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message cannot be read: Error parsing message" in (caught.value.details() or "")
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("unary")])
async def test_a_unary_call_whose_message_does_not_come_is_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MESSAGE_SECONDS", 0.2)
    async with serving(every_kind(lambda: None)) as channel:
        silent: Any = channel.stream_stream(f"/{SERVICE}/{name}")(timeout=20)
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await silent.details() == "the call's message must come within 0.2 s, and has not"
        assert await call(channel, name) == [b"answer"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("unary")])
async def test_a_unary_call_that_ends_without_a_message_is_answered(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """grpc itself leaves it open until its client goes."""
    async with serving(every_kind(lambda: None)) as channel:
        silent: Any = channel.stream_stream(f"/{SERVICE}/{name}")(timeout=10)
        await silent.done_writing()
        assert await silent.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await silent.details() == "the call must have a message, and ended without"
        assert await call(channel, name) == [b"answer"]
        with caplog.at_level(logging.INFO):
            caplog.clear()
            gone: Any = channel.stream_stream(f"/{SERVICE}/{name}")(timeout=10)
            await asyncio.sleep(0.05)  # Its beginning is on its way.
            gone.cancel()
            await asyncio.sleep(0.2)
            assert not caplog.records, "who has gone is told nothing"
