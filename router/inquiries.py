"""Inquiries: what becomes of attempts whose prefill worker is gone before it had told of the hand-off.

It may have committed them. Their decode worker knows; it is asked, and until it has answered nothing is cancelled and nothing
begun anew. A decode worker that is gone as well ends its session, which fails them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from common.errors import PdserveError
from router.attempt import Attempt
from router.completion import Completion, Stage
from router.fleet.fleet import Fleet

ANSWER_SECONDS: Final = 2.0
"""Longer than a decode worker's step, and no longer than a silent one is believed in."""


class _Inquiry(NamedTuple):
    """error: what ended the prefill worker's session. timer: of the answer."""

    attempt: Attempt
    error: PdserveError
    timer: asyncio.TimerHandle


class Inquiries:
    """Of one request's completions. Event loop only."""

    def __init__(self, fleet: Fleet, *, on_lost: Callable[[Completion, PdserveError], None]) -> None:
        """on_lost: the decode worker does not have it either, or does not say."""
        self._fleet = fleet
        self._on_lost = on_lost
        self._open: dict[Completion, _Inquiry] = {}

    def begin(self, completion: Completion, error: PdserveError) -> None:
        if (old := self._open.pop(completion, None)) is not None:  # Of an earlier attempt.
            old.timer.cancel()
        attempt = completion.attempt
        assert attempt is not None and attempt.pair.decode is not None
        session = self._fleet.session(attempt.pair.decode)
        if session is None or not attempt.pair.decode.has_session:
            self._on_lost(completion, error)
            return
        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self.fail, completion)
        self._open[completion] = _Inquiry(attempt, error, timer)
        session.inquire(completion.uid, attempt.number)

    def fail(self, completion: Completion) -> None:
        """Unless it is past that, or nobody asked."""
        if (inquiry := self._open.pop(completion, None)) is None:
            return
        inquiry.timer.cancel()
        if completion.attempt is inquiry.attempt and completion.stage is Stage.PREFILL:
            self._on_lost(completion, inquiry.error)

    def close(self) -> None:
        """Idempotent."""
        for inquiry in self._open.values():
            inquiry.timer.cancel()
        self._open.clear()
