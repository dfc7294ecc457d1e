"""The kinds of engine handle, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from common.engine.handle import Build, EngineHandle
from common.engine.process import ProcessEngine
from common.engine.sim.engine import SimEngine
from common.engine.thread import ThreadEngine

_KINDS: Final[dict[str, Callable[..., EngineHandle]]] = {"thread": ThreadEngine, "process": ProcessEngine, "sim": SimEngine}


def make_engine(kind: str, build: Build, *, on_event: Callable[[Any], None]) -> EngineHandle:
    """Not started. Call within the running loop. Raises KeyError on a kind that is not known."""
    return _KINDS[kind](build, on_event=on_event)
