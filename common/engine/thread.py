"""ThreadEngine: an EngineHandle whose core runs in a thread of this process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from common.engine.core_loop import Close, CoreLoop, Item
from common.engine.handle import Build
from common.engine.loop_front import LoopFront


class ThreadEngine(LoopFront):
    def __init__(self, build: Build, *, on_event: Callable[[Any], None], name: str = "engine") -> None:
        super().__init__(on_event)
        self._build = build
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def start(self) -> Any:
        self._thread.start()
        return await self._started

    async def close(self) -> None:
        self._close_inlets()
        if self._thread.ident is None:
            return
        self._send(Close(), None)
        await asyncio.shield(self._died)
        # That was its last word, but a thread that still frees tensors when the interpreter ends makes torch abort the process.
        self._thread.join()

    def _send(self, command: Any, call_id: int | None) -> None:
        self._inbox.put((command, call_id))

    # Engine thread from here on: this object is the core's Port.

    def take(self, timeout_seconds: float) -> Iterator[Item]:
        try:
            yield self._inbox.get(timeout=timeout_seconds) if timeout_seconds else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            pass

    def emit(self, event: Any) -> None:
        """At once, not after the step: a request's start is news before its first chunk is computed."""
        self._to_loop(self._deliver, event)

    def flush(self) -> None:
        """Nothing waits."""

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._run_core()
        except BaseException as caught:
            error = caught
        self._to_loop(self._end, error)

    def _run_core(self) -> None:
        core = self._build(self.emit)
        self._to_loop(self._announce, core.description)
        CoreLoop(core, self).run()

    def _to_loop(self, callback: Callable[[Any], Any], value: Any) -> None:
        # A loop that is already closed has nobody left to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)
