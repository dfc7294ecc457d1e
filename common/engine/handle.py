"""The seam between a worker's event loop and its engine: commands in, replies and events out, all plain values.

    event loop                                  engine thread
    await handle.call(command) -> reply   --->  core.handle(command, call_id)   (between steps)
    handle.post(command)                  --->  core.handle(command, None)
    on_event(event)                       <---  emit(event)
                                                core.step() while core.has_work(); core.tick(now) at least every TICK

The core owns the model and the pools and is touched by the engine thread alone. Because only plain values cross, an engine in
its own process can stand behind the same interface.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from common.errors import PdserveError, Unavailable

TICK_SECONDS = 0.05
DEFERRED: Final = object()
"""What a core's handle() returns when the reply comes later as a Reply event."""

Emit = Callable[[Any], None]


@dataclass(frozen=True)
class Reply:
    """Answers a deferred call. An error is raised in the caller."""

    call_id: int
    value: Any = None
    error: PdserveError | None = None


class EngineCore(Protocol):
    """What an engine thread runs. Every method is called by that thread only."""

    def handle(self, command: Any, call_id: int | None) -> Any:
        """Acts on one command and returns its reply, or DEFERRED and later emits Reply(call_id, ...). A PdserveError it raises
        goes to the caller (with post: is dropped); any other exception ends the engine."""

    def abandon(self, call_id: int) -> None:
        """The caller of a deferred call went away: undo what the call asked for, also if its Reply is already on the way."""

    def has_work(self) -> bool:
        """Whether step() would do something; if not, the thread sleeps until a command or a tick."""

    def step(self) -> None:
        """One bounded unit of work: one forward pass."""

    def tick(self, now: float) -> None:
        """Clean-up that must not wait for work: leases, tombstones. now: time.monotonic() seconds."""

    def close(self) -> None:
        """Gives everything back; nothing is called after it."""


class EngineHandle(Protocol):
    """What the event loop sees of an engine."""

    async def start(self) -> Any:
        """Builds the core (loads the model); returns what it describes itself with. Raises what building raised."""

    async def call(self, command: Any) -> Any:
        """Sends a command and waits for its reply. Cancelling the wait abandons it. Raises Unavailable once the engine died."""

    def post(self, command: Any) -> None:
        """Sends a command nobody waits for."""

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        """Done when the engine has ended: with its exception, or None after close()."""

    async def close(self) -> None:
        """Ends the engine after the step under way."""


class ThreadEngine:
    """An EngineHandle whose core runs in a thread of this process."""

    def __init__(self, build: Callable[[Emit], EngineCore], *, on_event: Callable[[Any], None], name: str = "engine") -> None:
        """build: runs in the engine thread. on_event: runs in the event loop, in the order of emission, and must not block."""
        self._build = build
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[Any, int | None] | None] = queue.SimpleQueue()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._started: asyncio.Future[EngineCore] = self._loop.create_future()
        self._died: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        return self._died

    async def start(self) -> EngineCore:
        self._thread.start()
        return await self._started

    async def call(self, command: Any) -> Any:
        if self._died.done():
            raise Unavailable("the engine has ended")
        call_id = self._next_call
        self._next_call += 1
        future = self._calls[call_id] = self._loop.create_future()
        self._inbox.put((command, call_id))
        try:
            return await future
        except asyncio.CancelledError:
            self._inbox.put((_Abandon(call_id), None))
            raise
        finally:
            self._calls.pop(call_id, None)

    def post(self, command: Any) -> None:
        self._inbox.put((command, None))

    async def close(self) -> None:
        if self._thread.is_alive():
            self._inbox.put(None)
            await asyncio.shield(self._died)

    # Engine thread from here on.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            core = self._build(self._emit)
            self._to_loop(self._announce, core)
            self._serve(core)
        except BaseException as caught:
            error = caught
        self._to_loop(self._end, error)

    def _serve(self, core: EngineCore) -> None:
        try:
            last_tick = time.monotonic()
            while self._take_commands(core, wait=not core.has_work()):
                now = time.monotonic()
                if now - last_tick >= TICK_SECONDS:
                    core.tick(now)
                    last_tick = now
                if core.has_work():
                    core.step()
        finally:
            core.close()

    def _take_commands(self, core: EngineCore, *, wait: bool) -> bool:
        """Handles every command that is there; with wait, waits one tick for the first. False: close was asked for."""
        try:
            item = self._inbox.get(timeout=TICK_SECONDS) if wait else self._inbox.get_nowait()
            while item is not None:
                self._handle(core, *item)
                item = self._inbox.get_nowait()
            return False
        except queue.Empty:
            return True

    def _handle(self, core: EngineCore, command: Any, call_id: int | None) -> None:
        if isinstance(command, _Abandon):
            core.abandon(command.call_id)
            return
        try:
            value = core.handle(command, call_id)
        except PdserveError as error:
            if call_id is not None:
                self._emit(Reply(call_id, error=error))
            return
        if value is not DEFERRED and call_id is not None:
            self._emit(Reply(call_id, value))

    def _emit(self, item: Any) -> None:
        """At once, not after the step: a request's start is news before its first chunk is computed."""
        self._to_loop(self._deliver, item)

    def _to_loop(self, callback: Callable[[Any], Any], value: Any) -> None:
        # A loop that is already closed has nobody left to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)

    # Event loop again.

    def _announce(self, core: EngineCore) -> None:
        if not self._started.done():
            self._started.set_result(core)

    def _deliver(self, item: Any) -> None:
        if not isinstance(item, Reply):
            self._on_event(item)
        elif (future := self._calls.get(item.call_id)) is not None and not future.done():
            if item.error is not None:
                future.set_exception(item.error)
            else:
                future.set_result(item.value)

    def _end(self, error: BaseException | None) -> None:
        if not self._started.done():
            self._started.set_exception(error or Unavailable("the engine was closed before it had started"))
        if not self._died.done():
            self._died.set_result(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Unavailable("the engine has ended"))


@dataclass(frozen=True)
class _Abandon:
    call_id: int
