"""Many errors of one kind in the log."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import grpc
import pytest

from common.rpc.refusal_log import LINES_A_SECOND, RefusalLog
from tests.helpers.eventually import eventually

pytestmark = pytest.mark.unit

CALL: ContextVar[str] = ContextVar("call", default="none")
FULL, BAD = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT


class Log(logging.Logger):
    """Notes whose context its lines are written in, from which they take what they are about."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__("x")
        self.addHandler(handler)
        self.calls: list[str] = []

    def handle(self, record: logging.LogRecord) -> None:
        self.calls.append(CALL.get())
        super().handle(record)


async def test_the_first_have_a_line_each_and_the_rest_of_a_second_one_together(caplog: Any) -> None:
    log = Log(caplog.handler)
    refusals = RefusalLog(log)
    CALL.set("the first")
    for number in range(LINES_A_SECOND + 5):
        refusals.note("/S/M", FULL, f"full {number}")
    refusals.note("/S/M", BAD, "bad")
    assert [record.getMessage() for record in caplog.records] == [
        *(f"/S/M: RESOURCE_EXHAUSTED: full {number}" for number in range(LINES_A_SECOND)),
        "/S/M: INVALID_ARGUMENT: bad",
    ]
    caplog.clear()
    await eventually(lambda: len(caplog.records) > 0, within=10)
    refusals.note("/S/M", FULL, "full again")
    assert [record.getMessage() for record in caplog.records] == [
        f"/S/M: RESOURCE_EXHAUSTED: 5 more within a second, the last: full {LINES_A_SECOND + 4}",
        "/S/M: RESOURCE_EXHAUSTED: full again",
    ]
    assert log.calls[-2:] == ["none", "the first"], "what is said of many is about no one call"
