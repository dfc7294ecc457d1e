"""Saying what is going on while it takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from common.log_output import LineOutput


@contextmanager
def step(what: str, *, every: float = 5.0) -> Iterator[None]:
    """Prints what begins, that it still goes on every few seconds, and how long it took. On stderr: stdout is for results."""
    began, done = time.monotonic(), threading.Event()

    def remind() -> None:
        while not done.wait(every):
            say(f"... {what}: {time.monotonic() - began:.0f} s")

    reminder = threading.Thread(target=remind, daemon=True)
    say(what)
    reminder.start()
    try:
        yield
        say(f"{what}: done in {time.monotonic() - began:.1f} s")
    finally:
        done.set()
        reminder.join()


def say(text: str) -> None:
    """Waits for nobody: whoever says why it ends must end."""
    stderr().write(text)


@cache
def stderr() -> LineOutput:
    return LineOutput(2)
