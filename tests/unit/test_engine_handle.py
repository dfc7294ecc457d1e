"""ThreadEngine: commands in, replies and events out, and what happens when the core dies or a caller goes away."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from common.engine.handle import DEFERRED, Emit, Reply, ThreadEngine
from common.errors import ResourceExhausted, Unavailable


class EchoCore:
    """Replies with what it was told; ("later", x) replies on the next tick; "fail" and "die" raise."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.later: list[tuple[int, Any]] = []
        self.abandoned: list[int] = []
        self.steps_left = 0
        self.closed = False
        self.thread = threading.current_thread()

    def handle(self, command: Any, call_id: int | None) -> Any:
        assert threading.current_thread() is self.thread
        match command:
            case "fail":
                raise ResourceExhausted("full: 3 of 3")
            case "die":
                raise RuntimeError("boom")
            case ("later", value):
                assert call_id is not None
                self.later.append((call_id, value))
                return DEFERRED
            case ("never", _):
                return DEFERRED
            case ("steps", count):
                self.steps_left = count
        return command

    def abandon(self, call_id: int) -> None:
        self.abandoned.append(call_id)

    def has_work(self) -> bool:
        return self.steps_left > 0

    def step(self) -> None:
        self.emit(("step", self.steps_left))
        self.steps_left -= 1

    def tick(self, now: float) -> None:
        for call_id, value in self.later:
            self.emit(Reply(call_id, value))
        self.later.clear()

    def close(self) -> None:
        self.closed = True


async def started() -> tuple[ThreadEngine, EchoCore, list[Any]]:
    events: list[Any] = []
    engine = ThreadEngine(EchoCore, on_event=events.append)
    core = await engine.start()
    assert isinstance(core, EchoCore)
    return engine, core, events


async def test_a_call_returns_its_reply_at_once_or_deferred() -> None:
    engine, core, _ = await started()
    assert await engine.call("hello") == "hello"
    assert await asyncio.gather(*(engine.call(("later", i)) for i in (1, 2))) == [1, 2]
    await engine.close()
    assert core.closed and engine.died.result() is None


async def test_an_error_of_the_core_reaches_the_caller_and_ends_nothing() -> None:
    engine, _, _ = await started()
    with pytest.raises(ResourceExhausted, match="3 of 3"):
        await engine.call("fail")
    engine.post("fail")
    assert await engine.call("still here") == "still here"
    await engine.close()


async def test_events_arrive_in_order_while_it_has_work() -> None:
    engine, _, events = await started()
    await engine.call(("steps", 100))
    while len(events) < 100:
        await asyncio.sleep(0.001)
    assert events == [("step", n) for n in range(100, 0, -1)]
    await engine.close()


async def test_a_cancelled_call_is_abandoned_in_the_core() -> None:
    engine, core, _ = await started()
    call = asyncio.ensure_future(engine.call(("never", 0)))
    await asyncio.sleep(0)  # the task has sent its command
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.call("the abandonment is in")
    assert core.abandoned == [0]
    await engine.close()


async def test_the_core_dying_fails_every_call_and_is_told() -> None:
    engine, core, _ = await started()
    waiting = asyncio.ensure_future(engine.call(("never", 0)))
    with pytest.raises(Unavailable):
        await engine.call("die")
    with pytest.raises(Unavailable):
        await waiting
    assert isinstance(await engine.died, RuntimeError) and core.closed
    with pytest.raises(Unavailable):
        await engine.call("anybody?")


async def test_a_core_that_cannot_be_built_fails_the_start() -> None:
    def build(emit: Emit) -> EchoCore:
        raise ValueError("no such model")

    engine = ThreadEngine(build, on_event=lambda event: None)
    with pytest.raises(ValueError, match="no such model"):
        await engine.start()
