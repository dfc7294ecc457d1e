"""The seam between a worker's event loop and its engine: commands in, replies and events out, all plain values.

    event loop                                  engine
    await handle.call(command) -> reply   --->  core.handle(command, call_id)   (between steps)
    handle.post(command)                  --->  core.handle(command, None)
    on_event(event)                       <---  emit(event)
    handle.listen(socket, to_command)           a peer's engine  --->  core.handle(to_command(message), None)
                                                core.step() while core.has_work(); core.tick(now) at least every TICK

The core owns the model and the pools and is touched by one thread alone: a thread of this process (thread.py) or a process of its
own (process.py). Because only plain values cross, nobody on either side can tell which.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from common.engine.inlet import ToCommand
from common.errors import PdserveError
from common.work import Compatibility

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


class Urgent:
    """Base of events that are news before the step that emits them is over."""

    __slots__ = ()


@dataclass(frozen=True)
class EngineDescription:
    """What a worker's engine is, once it is there. pool_pages: of its KV pool; page_bytes: of each, over all layers."""

    compatibility: Compatibility
    pool_pages: int
    page_bytes: int


class EngineCore(Protocol):
    """What an engine runs. Every method is called by the engine's thread only."""

    @property
    def description(self) -> Any:
        """What start() returns on the other side: a plain picklable value."""

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


Build = Callable[[Emit], EngineCore]
"""Makes the core, in the thread that will run it. For a process of its own it must be picklable: a function of a module, or a
partial of one."""


class EngineHandle(Protocol):
    """What the event loop sees of an engine."""

    async def start(self) -> Any:
        """Builds the core (loads the model); returns its description. Raises what building raised."""

    async def call(self, command: Any) -> Any:
        """Sends a command and waits for its reply. Cancelling the wait abandons it. Raises Unavailable once the engine died."""

    def post(self, command: Any) -> None:
        """Sends a command nobody waits for."""

    def listen(self, connection: socket.socket, to_command: ToCommand) -> None:
        """Until its other end is closed, each message of this socket (common/engine/inlet.py; the engine's from now on) is a
        command, too, handled as if it had been posted. In which order with those that are, nobody knows."""

    @property
    def died(self) -> asyncio.Future[BaseException | None]:
        """Done when the engine has ended: with its exception, or None after close()."""

    async def close(self) -> None:
        """Ends the engine after the step under way."""
