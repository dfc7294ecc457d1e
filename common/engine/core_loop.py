"""CoreLoop: what an engine's thread does all its life, whichever process it is in: take commands, tick, step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from common.engine.handle import DEFERRED, TICK_SECONDS, EngineCore, Reply
from common.errors import PdserveError

Item = tuple[Any, int | None]
"""A command and the id of the call that waits for its reply."""


@dataclass(frozen=True)
class Abandon:
    """Nobody waits for this call any more."""

    call_id: int


@dataclass(frozen=True)
class Close:
    """No command comes after it."""


class Port(Protocol):
    """The core's end of its connection to the event loop. Engine thread only."""

    def take(self, timeout_seconds: float) -> Iterable[Item]:
        """Every command that is there, in order; waits so long for the first."""

    def emit(self, event: Any) -> None:
        """Sends to the event loop, now or with the next flush()."""

    def flush(self) -> None:
        """What was emitted is on its way."""


class CoreLoop:
    """Runs one core from its first command to its close()."""

    def __init__(self, core: EngineCore, port: Port) -> None:
        self._core = core
        self._port = port

    def run(self) -> None:
        """Until Close; the core is closed however this ends."""
        core = self._core
        try:
            last_tick = time.monotonic()
            while self.take_commands(wait=not core.has_work()):
                now = time.monotonic()
                if now - last_tick >= TICK_SECONDS:
                    core.tick(now)
                    last_tick = now
                self._port.flush()
                if core.has_work():
                    core.step()
                    self._port.flush()
        finally:
            core.close()

    def take_commands(self, *, wait: bool) -> bool:
        """Handles every command that is there; with wait, waits one tick for the first. False: close was asked for."""
        for command, call_id in self._port.take(TICK_SECONDS if wait else 0.0):
            if isinstance(command, Close):
                return False
            self._handle(command, call_id)
        return True

    def _handle(self, command: Any, call_id: int | None) -> None:
        if isinstance(command, Abandon):
            self._core.abandon(command.call_id)
            return
        try:
            value = self._core.handle(command, call_id)
        except PdserveError as error:
            if call_id is not None:
                self._port.emit(Reply(call_id, error=error))
            return
        if value is not DEFERRED and call_id is not None:
            self._port.emit(Reply(call_id, value))
