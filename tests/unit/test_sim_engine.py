"""The simulated engine: what a step emits is told at its end, commands wait for it, and it can be stopped in several ways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.engine.handle import Emit
from common.engine.sim.clock import SimClock
from common.engine.sim.engine import SimEngine
from common.errors import InvalidArgument, Unavailable
from tests.helpers.eventually import eventually

STEP_SECONDS = 0.05


class Core:
    """Steps as often as it was told to, and says when each began and ended."""

    def __init__(self, emit: Emit, clock: SimClock) -> None:
        self.emit, self.clock = emit, clock
        self.left = 0
        self.is_closed = False

    @property
    def description(self) -> str:
        return "a core"

    def handle(self, command: Any, call_id: int | None) -> Any:
        match command:
            case int():
                self.left += command
                return self.left
            case Exception():
                raise command
        return command

    def abandon(self, call_id: int) -> None:
        self.emit(("abandoned", time.monotonic()))

    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.left -= 1
        self.emit(("began", time.monotonic()))
        self.clock.spend(STEP_SECONDS)
        self.emit(("ended", time.monotonic()))

    def tick(self, now: float) -> None:
        self.emit(("tick", now))

    def close(self) -> None:
        self.is_closed = True


class Stand:
    def __init__(self, build: Callable[[Emit], Core] | None = None) -> None:
        self.told: list[tuple[str, float]] = []
        self.on_began: Callable[[], None] = lambda: None
        self.clock = SimClock()
        self.core: Core
        self.engine = SimEngine(build or self._build, on_event=self._on_event, clock=self.clock)

    def _build(self, emit: Emit) -> Core:
        self.core = Core(emit, self.clock)
        return self.core

    def _on_event(self, event: tuple[str, float]) -> None:
        if event[0] != "tick":
            self.told.append((event[0], time.monotonic()))
        if event[0] == "began":
            self.on_began()


async def test_a_step_is_told_when_it_is_over_and_its_start_at_once() -> None:
    stand = Stand()
    assert await stand.engine.start() == "a core"
    start = time.monotonic()
    stand.engine.post(2)
    await eventually(lambda: len(stand.told) == 4, within=5)
    assert [what for what, _ in stand.told] == ["began", "ended", "began", "ended"]
    began, ended, began_again, ended_again = (at - start for _, at in stand.told)
    assert began < ended and ended >= STEP_SECONDS - 0.002 and ended_again >= 2 * STEP_SECONDS - 0.002
    assert began_again < ended_again - STEP_SECONDS / 2
    await stand.engine.close()
    assert stand.core.is_closed and stand.engine.died.result() is None


async def test_a_command_waits_for_the_step_under_way() -> None:
    stand = Stand()
    await stand.engine.start()
    stand.engine.post(1)
    await eventually(lambda: stand.told, within=5)
    assert await stand.engine.call("hello") == "hello"
    assert [what for what, _ in stand.told] == ["began", "ended"], "the step was over first"
    assert await stand.engine.call("idle") == "idle"
    await stand.engine.close()


async def test_a_refusal_goes_to_the_caller_and_any_other_error_ends_the_engine() -> None:
    stand = Stand()
    await stand.engine.start()
    with pytest.raises(InvalidArgument, match="no"):
        await stand.engine.call(InvalidArgument("no"))
    assert not stand.engine.died.done()
    waiting = asyncio.create_task(stand.engine.call(AssertionError("a page is lost")))
    with pytest.raises(Unavailable, match="the engine has ended"):
        await waiting
    assert str(stand.engine.died.result()) == "a page is lost" and stand.core.is_closed
    with pytest.raises(Unavailable):
        await stand.engine.call(1)


async def test_a_core_that_cannot_be_built_is_what_start_raises() -> None:
    def fail(emit: Emit) -> Core:
        raise ValueError("no model")

    stand = Stand(fail)
    with pytest.raises(ValueError, match="no model"):
        await stand.engine.start()
    await stand.engine.close()


async def test_a_paused_engine_takes_nothing_until_it_is_resumed() -> None:
    stand = Stand()
    await stand.engine.start()
    stand.engine.pause()
    call = asyncio.create_task(stand.engine.call("later"))
    await asyncio.sleep(0.1)
    assert not call.done()
    stand.engine.resume()
    assert await asyncio.wait_for(call, 1) == "later"
    await stand.engine.close()


async def test_a_killed_engine_gives_nothing_back_and_tells_nothing() -> None:
    stand = Stand()
    await stand.engine.start()
    stand.on_began = stand.engine.kill
    stand.engine.post(1)
    await eventually(lambda: stand.told, within=5)
    await asyncio.sleep(2 * STEP_SECONDS)
    assert [what for what, _ in stand.told] == ["began"] and not stand.core.is_closed
    await stand.engine.close()


async def test_a_call_that_is_given_up_is_abandoned_in_the_core() -> None:
    stand = Stand()
    await stand.engine.start()
    stand.engine.pause()
    call = asyncio.create_task(stand.engine.call("never"))
    await asyncio.sleep(0)
    call.cancel()
    stand.engine.resume()
    await asyncio.sleep(0.02)
    assert [what for what, _ in stand.told] == ["abandoned"]
    await stand.engine.close()
