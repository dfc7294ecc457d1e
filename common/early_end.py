"""A program that is told to stop before it can hear: while it is still importing what it needs, which takes up to seconds. It has
taken nothing on, so it ends at once and well, as it does while it loads its model. Python's own way is a traceback.

    if __name__ == "__main__":
        early_end.begin()           before the other imports
    ...
        early_end.over()            where it takes signals over itself in another way than common/rpc/process.py does
"""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

_before: dict[int, Any] = {}


def begin() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # As by nohup.
            _before[number] = signal.signal(number, _end)


def over() -> None:
    """Signals do again what they did before."""
    while _before:
        signal.signal(*_before.popitem())


def _end(number: int, frame: object) -> NoReturn:
    os._exit(0)
