"""The router's spans of one request: the request itself, and under it each wait in line and each attempt."""

from __future__ import annotations

import time
from typing import Final

from common.tracing import NO_TRACING, Span, Tracing
from router.fleet.placement import Pair


class RequestTrace:
    """Event loop only."""

    def __init__(self, tracing: Tracing, *, parent: str, arrived_at: float) -> None:
        """parent: the client's traceparent, or "". arrived_at: time.monotonic() seconds."""
        self._tracing = tracing
        self._root = tracing.begin("request", parent=parent, began=arrived_at, is_server=True)

    def queued(self, *, since: float, uid: int, error: str = "") -> None:
        """A wait in line is over: its turn has come, or error says why it will not (a refusal, or "cancelled")."""
        self._tracing.stage(
            "queue", parent=self._root.traceparent, began=since, ended=time.monotonic(), error=error, uid=str(uid)
        )

    def attempt(self, pair: Pair, *, uid: int, number: int, members: int) -> AttemptTrace:
        """uid: of the first of its members."""
        span = self._tracing.begin(
            "attempt",
            parent=self._root.traceparent,
            began=time.monotonic(),
            uid=str(uid),
            attempt=number,
            members=members,
            prefill_worker=pair.prefill.id,
            decode_worker=pair.decode.id if pair.decode is not None else "",
        )
        return AttemptTrace(span, members)

    def end(self, outcome: str, *, request_id: str, output_tokens: int) -> None:
        """outcome: "OK" or the call's status."""
        error = "" if outcome == "OK" else outcome
        self._root.end(error=error, request_id=request_id, outcome=outcome, output_tokens=output_tokens)


class AttemptTrace:
    """Ends when nothing of the attempt is left on any worker."""

    def __init__(self, span: Span, members: int) -> None:
        self._span = span
        self._members = members
        self._error = ""

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def failed(self, why: str) -> None:
        self._error = why

    def left(self) -> None:
        """Once for each member."""
        self._members -= 1
        if self._members == 0:
            self._span.end(error=self._error)


UNTRACED: Final = RequestTrace(NO_TRACING, parent="", arrived_at=0.0)
