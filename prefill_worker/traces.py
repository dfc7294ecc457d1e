"""A prefill worker's spans of one request, made when it has ended here."""

from __future__ import annotations

import time
from typing import Final

from common.core import Req
from common.tracing import Tracing
from prefill_worker.trip import Mark, Trip

STAGES: Final = (
    ("queue", Mark.ARRIVED, Mark.ADMITTED),
    ("reserve", Mark.ADMITTED, Mark.RESERVED),
    ("compute", Mark.RESERVED, Mark.COMPUTED),
    ("handoff", Mark.COMMITTING, Mark.HANDED_OVER),
)


def trace(tracing: Tracing, trip: Trip, req: Req, *, error: str | None) -> None:
    """Under the router's span of the attempt. error: why it failed here; None if it did not: then a stage that was begun and is
    not over was cancelled."""
    if not tracing.is_on:
        return
    for name, begin, end in STAGES:
        if (began := trip.at(begin)) is None or (name == "reserve" and req.output_len == 1):
            continue
        ended, why = trip.at(end), ""
        if ended is None:
            ended, why = time.monotonic(), error or "cancelled"
        tracing.stage(
            name,
            parent=req.traceparent,
            began=began,
            ended=ended,
            error=why,
            request_id=req.request_id,
            uid=str(req.uid),
            attempt=req.attempt,
            input_tokens=len(req.input_ids),
            transport=trip.transport or "",
        )
