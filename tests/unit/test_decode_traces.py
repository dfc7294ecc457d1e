"""A decode worker's spans end, however its requests do, and nothing of them stays."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Unavailable
from common.tracing import NO_TRACING
from common.work import FinishReason, PageCounts, TokenOut, WorkFailure
from common.work_key import WorkKey
from decode_worker import commands, events
from decode_worker.traces import Traces
from tests.helpers.decode_core import EPOCH, first_tokens, make_req
from tests.helpers.stages import Stages


def make(n: int = 1) -> tuple[Traces, Stages, Any]:
    """With one ticket granted."""
    recorder = Stages()
    traces = Traces(recorder)
    req = make_req([1, 2, 3], uid=1, n=n)
    with traces.reserving(req):
        traces.granted(req, "t")
    return traces, recorder, req


def step(req: Any, *, index: int, finish: FinishReason | None = None, repeat: bool = False, offset: int = 0) -> events.StepTokens:
    key = req.key.for_completion(offset)
    first = [TokenOut(key, 0, 7, cached_tokens=0)] if repeat else []
    return events.StepTokens(EPOCH, (*first, TokenOut(key, index, 7, finish=finish)))


def commit(req: Any, finish: FinishReason | None = None) -> commands.Commit:
    return commands.Commit("t", tuple(token._replace(finish=finish) for token in first_tokens(req)), 1)


def test_a_request_is_received_and_then_decoded() -> None:
    traces, recorder, req = make()
    traces.committed(commit(req))
    traces.committed(commit(req))
    traces.told(step(req, index=1, repeat=True))
    traces.told(step(req, index=2, finish=FinishReason.LENGTH))
    traces.ended("t", "given back unused")
    assert recorder.told == [("receive", ""), ("decode", "")] and recorder.outputs[-1] == 3
    assert len(traces) == 0


def test_steps_that_overtake_the_commit_s_answer_count() -> None:
    traces, recorder, req = make(n=2)
    traces.told(step(req, index=1, repeat=True, finish=FinishReason.STOP))
    traces.committed(commit(req))
    traces.told(step(req, index=1, finish=FinishReason.LENGTH, offset=1))
    assert recorder.told == [("decode", ""), ("receive", ""), ("decode", "")]
    assert len(traces) == 0


def test_first_tokens_that_are_the_last_decode_nothing() -> None:
    traces, recorder, req = make()
    traces.committed(commit(req, FinishReason.STOP))
    assert recorder.told == [("receive", "")] and len(traces) == 0


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("how", ["cancel", "session", "retract", "fail"])
def test_every_other_end_is_an_error(how: str, committed: bool) -> None:
    traces, recorder, req = make(n=2)
    if committed:
        traces.committed(commit(req))
    for offset in range(2):
        key = req.key.for_completion(offset)
        match how:
            case "cancel":
                traces.asked(commands.Cancel(key))
            case "session":
                traces.asked(commands.SessionClosed(EPOCH))
            case "retract":
                traces.told(events.Retracted(key))
            case "fail":
                traces.told(events.Failed(WorkFailure.of(key, Unavailable("the lease ran out"), retryable=True)))
    ended = recorder.told[1:] if committed else recorder.told
    assert [name for name, _ in ended] == (["decode"] * 2 if committed else ["receive"])
    assert all(error for _, error in ended) and len(traces) == 0


def test_a_ticket_given_back_ends_its_span() -> None:
    traces, recorder, _ = make()
    traces.ended("t", "given back unused")
    traces.ended("t", "given back unused")
    assert recorder.told == [("receive", "given back unused")] and len(traces) == 0


def test_a_prompt_computed_here_waits_is_computed_and_decoded() -> None:
    recorder = Stages()
    traces = Traces(recorder)
    req = make_req([1, 2, 3], uid=1)
    traces.asked(commands.Prefill(req, deadline=1.0))
    traces.told(events.PrefillStarted(req.key, 0))
    traces.told(events.StepTokens(EPOCH, (TokenOut(req.key, 0, 7, cached_tokens=0),)))
    traces.told(step(req, index=1, finish=FinishReason.LENGTH))
    assert recorder.told == [("queue", ""), ("compute", ""), ("decode", "")] and len(traces) == 0


def test_nothing_is_kept_while_traces_are_off() -> None:
    traces = Traces(NO_TRACING)
    req = make_req([1, 2, 3], uid=1)
    with traces.reserving(req):
        traces.granted(req, "t")
    traces.asked(commands.Prefill(req, deadline=1.0))
    traces.committed(commit(req))
    assert len(traces) == 0
    traces.told(events.Retracted(WorkKey(EPOCH, 1, 1)))


@pytest.mark.parametrize("how", ["cancel", "session", "fail"])
def test_what_ends_between_the_grant_and_its_answer_leaves_nothing_open(how: str) -> None:
    recorder = Stages()
    traces, req = Traces(recorder), make_req([1, 2, 3], uid=1, n=2)
    second = req.key.for_completion(1)
    with traces.reserving(req):
        match how:
            case "cancel":
                traces.asked(commands.Cancel(second))
            case "session":
                traces.asked(commands.SessionClosed(EPOCH))
            case "fail":
                traces.told(events.Failed(WorkFailure.of(second, Unavailable("the lease ran out"), retryable=True)))
        traces.granted(req, "t")
    assert len(traces) == (0 if how == "session" else 1), "the other one has not ended"
    traces.asked(commands.Cancel(req.key))
    assert len(traces) == 0
    assert recorder.told == ([] if how == "session" else [("receive", "cancelled")])


def test_an_engine_that_has_nothing_left_has_nothing_open() -> None:
    """Committed ahead of a sender that died, whose second completion ended with its first token: nobody tells of that one."""
    traces, recorder, req = make(n=2)
    waiting = make_req([1, 2, 3], uid=9)
    traces.asked(commands.Prefill(waiting, deadline=1.0))
    traces.told(step(req, index=1, repeat=True, finish=FinishReason.STOP))
    busy = events.Stats(1, 0, PageCounts(9, 1, 0, 0, 10), states=events.StateCounts(running=1))
    traces.told(busy)
    assert len(traces) == 2
    traces.told(events.Stats(0, 0, PageCounts(10, 0, 0, 0, 10)))
    assert recorder.told == [("decode", ""), ("receive", "ended unseen")]
    assert len(traces) == 1, "one may be on its way to the engine still"
