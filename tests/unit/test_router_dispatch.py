"""Dispatch: what two streams say about one completion, in whichever order they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from common.rpc.gen.pdserve.v1 import decode_pb2, prefill_pb2, work_pb2
from router.completion import Completion, Stage
from router.dispatch import Dispatch
from router.output import Output

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

    def retracted(self, completion: Completion) -> None: ...

    def failed(self, completion: Completion, error: Any, **_: Any) -> None: ...

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
