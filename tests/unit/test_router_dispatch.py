"""Dispatch: what two streams say about one completion, in whichever order they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Leaving, Unavailable
from common.rpc.gen.pdserve.v1 import decode_pb2, prefill_pb2, work_pb2
from router.attempt import Attempt
from router.completion import Completion, Stage
from router.dispatch import Dispatch
from router.fleet.placement import Pair
from router.stake import Stake
from router.text.output import Output
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class Record:
    """WorkEvents and CompletionEvents, written down."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def prefill_started(self, completion: Completion, cached_tokens: int, now: float) -> None:
        self.told.append(("started", cached_tokens, len(completion.token_ids)))

    def handed_off(self, completion: Completion, now: float) -> None:
        self.told.append(("handed off",))
        completion.stage = Stage.DECODE

    def token_arrived(self, completion: Completion, now: float) -> None:
        self.told.append(("token", completion.token_ids[-1]))

    def sender_lost(self, completion: Completion, error: Any) -> None:
        self.told.append(("sender lost", str(error)))

    def inquiry_answered(self, completion: Completion, *, is_committed: bool, now: float) -> None:
        self.told.append(("answered", is_committed))

    def retracted(self, completion: Completion) -> None: ...

    def handed_back(self, completion: Completion, reason: str) -> None:
        self.told.append(("handed back", reason))

    def failed(self, completion: Completion, error: Any, **_: Any) -> None:
        self.told.append(("failed", str(error)))

    def gap_too_wide(self, completion: Completion) -> None: ...


def test_a_decode_stream_that_overtakes_prefills_still_tells_what_was_cached() -> None:
    record, dispatch = Record(), Dispatch()
    completion = Completion(uid=7, number=0, output=Output(None, logprobs=False, request_id="r", number=0), events=record)
    completion.stage, completion.attempt_number = Stage.PREFILL, 1
    dispatch.add(completion, record)
    first = work_pb2.Token(uid=7, attempt=1, index=0, token_id=40, cached_tokens=399)
    second = work_pb2.Token(uid=7, attempt=1, index=1, token_id=41)
    worker: Any = None
    dispatch.decode_message(worker, decode_pb2.DecodeSessionResponse(step=decode_pb2.Step(tokens=[first, second])))
    assert record.told == [("started", 399, 0), ("handed off",), ("token", 40), ("token", 41)]
    dispatch.prefill_message(worker, prefill_pb2.PrefillSessionResponse(first_token=first))
    assert record.told[-1] == ("token", 41), "the prefill worker's own news of it is a double"


def test_a_decode_worker_that_prefills_itself_tells_of_the_start_and_makes_the_first_token() -> None:
    record, dispatch = Record(), Dispatch()
    completion = Completion(uid=7, number=0, output=Output(None, logprobs=False, request_id="r", number=0), events=record)
    completion.stage, completion.attempt_number = Stage.PREFILL, 1
    dispatch.add(completion, record)
    worker: Any = None
    started = prefill_pb2.PrefillStarted(uid=7, attempt=1, cached_tokens=16)
    dispatch.decode_message(worker, decode_pb2.DecodeSessionResponse(started=started))
    first = work_pb2.Token(uid=7, attempt=1, index=0, token_id=40, cached_tokens=16)
    dispatch.decode_message(worker, decode_pb2.DecodeSessionResponse(step=decode_pb2.Step(tokens=[first])))
    assert record.told == [("started", 16, 0), ("started", 16, 0), ("handed off",), ("token", 40)]


def group(record: Record, *, stage: Stage) -> tuple[Dispatch, list[Completion]]:
    """Two completions of one attempt, waiting for their hand-off, the first of them in this stage."""
    dispatch = Dispatch()
    members = tuple(
        Completion(uid=7 + i, number=i, output=Output(None, logprobs=False, request_id="r", number=i), events=record)
        for i in range(2)
    )
    pair = Pair(worker("p", "prefill"), worker("d", "decode"))
    attempt = Attempt(1, pair, members, Stake(pair, members=2, tokens=1, pages=1, on_freed=lambda tokens: None))
    for member in members:
        member.begin(attempt)
        dispatch.add(member, record)
    members[0].stage = stage
    return dispatch, list(members)


@pytest.mark.parametrize("uid", [7, 8])
@pytest.mark.parametrize(("stage", "told"), [(Stage.PREFILL, [("failed", "no answer to Commit")]), (Stage.DECODE, [])])
def test_a_lost_answer_to_commit_does_not_end_what_the_decode_worker_runs(uid: int, stage: Stage, told: list[Any]) -> None:
    record = Record()
    dispatch, members = group(record, stage=stage)
    assert members[0].attempt is not None
    failure = work_pb2.Failure(uid=uid, attempt=1, code=14, message="no answer to Commit", retryable=True)
    dispatch.prefill_message(members[0].attempt.pair.prefill, prefill_pb2.PrefillSessionResponse(failure=failure))
    assert record.told == told


def test_what_a_leaving_worker_gives_back_is_no_failure() -> None:
    record = Record()
    dispatch, members = group(record, stage=Stage.PREFILL)
    assert members[0].attempt is not None
    pair = members[0].attempt.pair
    failure = work_pb2.Failure(uid=7, attempt=1, code=14, message="p is leaving", retryable=True, handed_back=True)
    dispatch.prefill_message(pair.prefill, prefill_pb2.PrefillSessionResponse(failure=failure))
    dispatch.session_ended(pair.prefill, Leaving("p has left"))
    dispatch.session_ended(pair.prefill, Unavailable("p has died"))
    assert record.told == [
        ("handed back", "p is leaving"),
        *2 * [("handed back", "p has left")],
        *2 * [("sender lost", "p has died")],
    ]


@pytest.mark.parametrize(
    ("stage", "who", "told"),
    [
        (Stage.PREFILL, "prefill", [("sender lost", "gone")] * 2),
        (Stage.PREFILL, "decode", [("failed", "gone")] * 2),
        (Stage.DECODE, "prefill", [("sender lost", "gone")]),
        (Stage.DECODE, "decode", [("failed", "gone")] * 2),
    ],
)
def test_a_lost_worker_ends_what_it_has_but_after_a_lost_sender_the_decode_worker_is_asked(
    stage: Stage, who: str, told: list[Any]
) -> None:
    """stage: of the first of two; the other's hand-off has not been told."""
    record = Record()
    dispatch, (first, second) = group(record, stage=stage)
    assert first.attempt is not None
    prefill, decode = first.attempt.pair
    assert decode is not None
    dispatch.session_ended(prefill if who == "prefill" else decode, Unavailable("gone"))
    assert record.told == told
    holding = decode_pb2.Holding(uid=second.uid, attempt=1, committed=True)
    dispatch.decode_message(decode, decode_pb2.DecodeSessionResponse(holding=holding))
    assert record.told[-1] == ("answered", True)
