"""Calls that ended in an error of ours, in the log: the first of each second by themselves, the others counted in one line.

A flood of refusals would cost more to write down than to refuse, and hide every other line.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from dataclasses import dataclass
from typing import Final

import grpc

LINES_A_SECOND: Final = 20
"""Of one method and status."""


@dataclass
class _Second:
    """From the first call on. last: the text of the last one that was only counted."""

    lines: int = 0
    counted: int = 0
    last: str = ""


class RefusalLog:
    """Of one server. Event loop only."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seconds: dict[tuple[str, grpc.StatusCode], _Second] = {}

    def note(self, method: str, status: grpc.StatusCode, text: str) -> None:
        """One call, this task's, has ended so."""
        if (second := self._seconds.get((method, status))) is None:
            second = self._seconds[method, status] = _Second()
            asyncio.get_running_loop().call_later(1.0, self._close, method, status, context=Context())  # It is about no one call.
        if second.lines < LINES_A_SECOND:
            second.lines += 1
            self._log.info("%s: %s: %s", method, status.name, text)
        else:
            second.counted += 1
            second.last = text

    def _close(self, method: str, status: grpc.StatusCode) -> None:
        if (second := self._seconds.pop((method, status))).counted:
            self._log.info("%s: %s: %d more within a second, the last: %s", method, status.name, second.counted, second.last)
