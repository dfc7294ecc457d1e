"""Every EngineHandle: commands in, replies and events out, and what happens when the core dies or a caller goes away."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from common.engine import inlet
from common.engine.engines import make_engine
from common.engine.handle import EngineHandle
from common.errors import OutOfRange, ResourceExhausted, StartError, Unavailable
from common.worker_config import ENGINES
from tests.helpers.echo_core import EchoCore, build_start_error, build_unbuildable, build_value_error, steps_from_bytes
from tests.helpers.eventually import eventually

pytestmark = pytest.mark.parametrize("kind", ENGINES)


async def started(kind: str) -> tuple[EngineHandle, list[Any]]:
    events: list[Any] = []
    engine = make_engine(kind, EchoCore, on_event=events.append)
    assert await engine.start() == EchoCore.description
    return engine, events


async def test_a_call_returns_its_reply_at_once_or_deferred(kind: str) -> None:
    engine, events = await started(kind)
    assert await engine.call("hello") == "hello"
    assert await asyncio.gather(*(engine.call(("later", i)) for i in (1, 2))) == [1, 2]
    await engine.close()
    assert events == ["closed"] and engine.died.result() is None


async def test_an_error_of_the_core_reaches_the_caller_and_ends_nothing(kind: str) -> None:
    engine, _ = await started(kind)
    with pytest.raises(ResourceExhausted, match="3 of 3"):
        await engine.call("fail")
    with pytest.raises(OutOfRange, match="^prompt must be short, got 9$") as caught:
        await engine.call("refuse")
    assert caught.value.field == "prompt" and caught.value.log_text == "prompt must be short, got 9"
    engine.post("fail")
    assert await engine.call("still here") == "still here"
    await engine.close()


async def test_events_arrive_in_order_while_it_has_work(kind: str) -> None:
    engine, events = await started(kind)
    await engine.call(("steps", 100))
    await eventually(lambda: len(events) == 100, within=5)
    assert events == [("step", n) for n in range(100, 0, -1)]
    await engine.close()


async def test_a_cancelled_call_is_abandoned_in_the_core(kind: str) -> None:
    engine, _ = await started(kind)
    call = asyncio.ensure_future(engine.call(("never", 0)))
    await asyncio.sleep(0)  # the task has sent its command
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await engine.call("abandoned") == [0]
    await engine.close()


async def test_the_core_dying_fails_every_call_and_is_told(kind: str) -> None:
    engine, events = await started(kind)
    waiting = asyncio.ensure_future(engine.call(("never", 0)))
    with pytest.raises(Unavailable):
        await engine.call("die")
    with pytest.raises(Unavailable):
        await waiting
    died = await engine.died
    assert isinstance(died, RuntimeError) and str(died) == "boom" and events == ["closed"]
    with pytest.raises(Unavailable):
        await engine.call("anybody?")
    await engine.close()


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (build_value_error, ValueError, "no such model"),
        (build_start_error, StartError, "no such model: /nowhere"),
        (build_unbuildable, Exception, "unbuildable: a test"),
    ],
)
async def test_a_core_that_cannot_be_built_fails_the_start(
    kind: str, build: Callable[[Any], EchoCore], error: type[Exception], text: str
) -> None:
    engine = make_engine(kind, build, on_event=lambda event: None)
    with pytest.raises(error) as caught:
        await engine.start()
    if error is Exception:
        assert text in str(caught.value)
    else:
        assert type(caught.value) is error and str(caught.value) == text
    await engine.close()


def line() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def test_what_comes_by_an_inlet_is_a_command_until_its_end(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    engine, events = await started(kind)
    before = await engine.call(("descriptors",))
    (ours, theirs), (other, others) = line(), line()
    engine.listen(theirs, steps_from_bytes)
    engine.listen(others, steps_from_bytes)
    assert theirs.fileno() == -1 or kind != "process"
    ours.send(b"2")
    await eventually(lambda: len(events) == 2, within=5)
    for message in (b"no number", bytes(inlet.MAX_MESSAGE_BYTES) + b"1", b"1"):
        ours.send(message)
    ours.close()
    await eventually(lambda: len(events) == 3, within=5)
    other.send(b"1")
    await eventually(lambda: len(events) == 4, within=5)
    assert events == [("step", 2), ("step", 1), ("step", 1), ("step", 1)]
    other.close()
    await eventually(lambda: has_descriptors(engine, before), within=5)
    assert await engine.call("still here") == "still here"
    await engine.close()


async def has_descriptors(engine: EngineHandle, count: int) -> bool:
    found: int = await engine.call(("descriptors",))
    return found == count


async def test_an_engine_s_inlets_end_with_it(kind: str) -> None:
    engine, _ = await started(kind)
    ours, theirs = line()
    with ours:
        engine.listen(theirs, steps_from_bytes)
        await engine.close()
        ours.settimeout(5)
        assert await asyncio.to_thread(ours.recv, 1) == b""


async def test_a_sender_that_does_not_stop_keeps_no_command_from_being_acted_on(kind: str) -> None:
    engine, events = await started(kind)
    ours, theirs = line()
    engine.listen(theirs, steps_from_bytes)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            ours.send(b"0")

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(20):
            assert await asyncio.wait_for(engine.call("hello"), 5) == "hello"
    finally:
        stop.set()
        await asyncio.to_thread(flooding.join)
        ours.close()
    await engine.close()


async def test_an_engine_that_was_never_started_closes(kind: str) -> None:
    await make_engine(kind, EchoCore, on_event=lambda event: None).close()


async def test_an_event_that_is_taken_badly_costs_no_other(kind: str) -> None:
    taken: list[Any] = []
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context["exception"]))

    def take(event: Any) -> None:
        assert event != ("step", 3)
        taken.append(event)

    engine = make_engine(kind, EchoCore, on_event=take)
    await engine.start()
    await engine.call(("steps", 5))
    await eventually(lambda: taken == [("step", n) for n in (5, 4, 2, 1)], within=5)
    assert len(unhandled) == 1
    await engine.close()
