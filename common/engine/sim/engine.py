"""SimEngine: an EngineHandle whose core runs in the event loop itself, since a simulated step only takes time.

    turn      tell what is due -> take commands -> tick -> one step -> wait for the step's end, a command or the next tick

A step's bookkeeping is done at its start; what it emits after the launch is told when the simulated device is done (SimClock),
and commands wait until then, as they wait for a real engine's step. Many workers fit into one process: no thread, no polling.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from common.engine.core_loop import CoreLoop, Item
from common.engine.handle import TICK_SECONDS, Build, EngineCore
from common.engine.loop_front import LoopFront
from common.engine.sim.clock import SimClock

EARLY_SECONDS: Final = 0.0006
"""The loop's timers count in milliseconds: one that fires so much too early counts as in time."""


class SimEngine(LoopFront):
    """Event loop only. paused, kill(): for fault injection."""

    def __init__(self, build: Build, *, on_event: Callable[[Any], None], clock: SimClock | None = None) -> None:
        """clock: the one that the core and its runner go by; None: steps take the time that they take."""
        super().__init__(on_event)
        self.clock = clock or SimClock()
        self._build = build
        self._core: EngineCore | None = None
        self._commands: CoreLoop | None = None
        self._inbox: deque[Item] = deque()
        self._untold: deque[tuple[float, Any]] = deque()
        """Events and when they are to be told, in order."""
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._last_tick = 0.0
        self._stepped = False
        self._is_soon = False
        """A turn comes in the loop's next round."""
        self._is_paused = False

    async def start(self) -> Any:
        try:
            self._core = self._build(self.emit)
        except BaseException as error:
            self._finish(error)
            return await self._started
        self._commands = CoreLoop(self._core, self)
        self._announce(self._core.description)
        self._set_timer(0.0)
        return await self._started

    async def close(self) -> None:
        self._close_inlets()
        if self._core is not None:
            self._finish(None)

    def kill(self) -> None:
        """As if its process were killed: nothing is given back or told any more."""
        self._core = self._commands = None
        self._untold.clear()
        self._finish(None)

    def pause(self) -> None:
        """As if it were stopped: takes no command and no step until resume()."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._set_timer(0.0)

    def _send(self, command: Any, call_id: int | None) -> None:
        self._inbox.append((command, call_id))
        if not (self.clock.is_busy or self._is_soon):
            self._set_timer(0.0)

    # This object is the core's Port.

    def take(self, timeout_seconds: float) -> list[Item]:
        items = list(self._inbox)
        self._inbox.clear()
        return items

    def emit(self, event: Any) -> None:
        self._untold.append((self.clock.busy_until, event))

    def flush(self) -> None:
        """What is due is told by the turn."""

    def _turn(self) -> None:
        self._timer, self._is_soon = None, False
        if self._core is None or self._died.done() or self._is_paused:
            return
        try:
            now = time.monotonic() + EARLY_SECONDS
            self._tell(until=now)
            if self.clock.busy_until <= now:
                self._work(self._core)
            self._tell(until=now)
        except BaseException as error:
            self._finish(error)
            return
        self._set_timer(self._next_wait())

    def _work(self, core: EngineCore) -> None:
        assert self._commands is not None
        self._commands.take_commands(wait=False)
        now = self.clock.now()
        if now - self._last_tick >= TICK_SECONDS:
            core.tick(now)
            self._last_tick = now
        follows, self._stepped = self._stepped, core.has_work()
        if self._stepped:
            self.clock.begin_step(follows=follows)
            core.step()

    def _tell(self, *, until: float) -> None:
        """What is due by then."""
        while self._untold and self._untold[0][0] <= until:
            item = self._untold.popleft()[1]
            try:
                self._deliver(item)
            except Exception as error:  # One event that is taken badly must not cost the ones after it.
                self._loop.call_exception_handler({"message": "an event of the engine was taken badly", "exception": error})

    def _next_wait(self) -> float:
        """Seconds to the next turn."""
        busy = self.clock.busy_until - time.monotonic()
        if busy > 0:
            return busy
        return 0.0 if self._stepped or self._inbox else TICK_SECONDS

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._died.done():
            return
        self._is_soon = seconds <= EARLY_SECONDS
        self._timer = self._loop.call_soon(self._turn) if self._is_soon else self._loop.call_later(seconds, self._turn)

    def _finish(self, error: BaseException | None) -> None:
        """Ends the core, once; what it has still to say is told."""
        self._close_inlets()
        core, self._core, self._commands = self._core, None, None
        if self._timer is not None:
            self._timer.cancel()
        self._inbox.clear()
        if core is not None:
            core.close()
        self._tell(until=math.inf)
        self._end(error)
