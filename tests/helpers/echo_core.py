"""EchoCore: an engine core for tests of the handles, which can be built in any process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from common.descriptor import Descriptor
from common.engine.handle import DEFERRED, Emit, Reply, Urgent
from common.errors import OutOfRange, ResourceExhausted, StartError


class News(Urgent):
    """An event that does not wait for the end of its step."""


class EchoCore:
    """Replies with what it was told; ("later", x) replies on the next tick; "fail" and "die" raise."""

    description = ("echo", 1)

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.later: list[tuple[int, Any]] = []
        self.abandoned: list[int] = []
        self.steps_left = 0
        self.pause = 0.0
        self.thread = threading.current_thread()

    def handle(self, command: Any, call_id: int | None) -> Any:
        assert threading.current_thread() is self.thread
        match command:
            case "fail":
                raise ResourceExhausted("full: 3 of 3")
            case "refuse":
                raise OutOfRange("prompt", "must be short", 9)
            case "die":
                raise RuntimeError("boom")
            case ("say and die", count):
                for _ in range(count):
                    self.emit(News())
                os.kill(os.getpid(), signal.SIGKILL)
            case "pid":
                return os.getpid()
            case "abandoned":
                return self.abandoned
            case ("log", text):
                logging.getLogger("echo").warning("%s", text)
            case ("later", value):
                assert call_id is not None
                self.later.append((call_id, value))
                return DEFERRED
            case ("never", _):
                return DEFERRED
            case ("steps", count):
                self.steps_left = count
            case ("slow steps", count, seconds):
                self.steps_left, self.pause = count, seconds
            case ("read", Descriptor() as descriptor):
                return os.pread(descriptor, 100, 0)
            case ("descriptors",):
                return len(list(Path("/proc/self/fd").iterdir()))
        return command

    def abandon(self, call_id: int) -> None:
        self.abandoned.append(call_id)

    def has_work(self) -> bool:
        return self.steps_left > 0

    def step(self) -> None:
        if self.pause:
            self.emit(News())
        self.emit(("step", self.steps_left))
        time.sleep(self.pause)
        self.steps_left -= 1

    def tick(self, now: float) -> None:
        for call_id, value in self.later:
            self.emit(Reply(call_id, value))
        self.later.clear()

    def close(self) -> None:
        self.emit("closed")


def steps_from_bytes(message: bytes) -> Any:
    """What comes by an inlet. Raises ValueError."""
    return ("steps", int(message))


class Unbuildable(Exception):
    """Cannot be unpickled: its constructor takes other things than its arguments."""

    def __init__(self, *, why: str) -> None:
        super().__init__(f"unbuildable: {why}")


def build_start_error(emit: Emit) -> EchoCore:
    raise StartError("no such model: /nowhere")


def build_value_error(emit: Emit) -> EchoCore:
    raise ValueError("no such model")


def build_unbuildable(emit: Emit) -> EchoCore:
    raise Unbuildable(why="a test")


def build_slowly(emit: Emit) -> EchoCore:
    time.sleep(60)
    return EchoCore(emit)
