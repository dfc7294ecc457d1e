"""Tokens to one completion, in order, exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from common.work import FinishReason
from router.attempt import Attempt
from router.completion import MAX_HELD, MOVES, Completion, Stage
from router.fleet.placement import Pair
from router.stake import Stake
from router.text.output import Output
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class Events:
    """Notes what a completion tells."""

    def __init__(self) -> None:
        self.arrived = 0
        self.gaps = 0

    def token_arrived(self, completion: Completion, now: float) -> None:
        self.arrived += 1

    def gap_too_wide(self, completion: Completion) -> None:
        self.gaps += 1


def make() -> tuple[Completion, Events]:
    events = Events()
    completion = Completion(uid=1, number=0, output=Output(None, request_id="r", number=0, logprobs=False), events=events)
    begin(completion, 1)
    return completion, events


def begin(completion: Completion, number: int) -> None:
    pair = Pair(worker("p", "prefill"), worker("d", "decode"))
    stake = Stake(pair, members=1, tokens=1, pages=1, on_freed=lambda tokens: None)
    completion.begin(Attempt(number, pair, (completion,), stake))


def token(index: int, *, last: bool = False) -> work_pb2.Token:
    finish = generation_pb2.FINISH_REASON_LENGTH if last else generation_pb2.FINISH_REASON_UNSPECIFIED
    return work_pb2.Token(uid=1, attempt=1, index=index, token_id=100 + index, finish=finish)


@given(st.lists(st.integers(0, 9), max_size=40), st.permutations(range(10)))
def test_each_index_is_delivered_once_and_in_order_hnd_15(doubles: list[int], order: list[int]) -> None:
    completion, events = make()
    for index in [*doubles, *order]:
        completion.deliver(token(index, last=index == 9), 0.0)
    assert completion.token_ids.tolist() == [100 + index for index in range(10)]
    assert (events.arrived, completion.finish, completion.output.count) == (10, FinishReason.LENGTH, 10)


def test_nothing_is_delivered_after_the_end() -> None:
    completion, events = make()
    for index in (0, 1, 2):
        completion.deliver(token(index, last=index == 1), 0.0)
    assert len(completion.token_ids) == 2 and events.arrived == 2


def test_tokens_held_for_a_gap_are_bounded() -> None:
    completion, events = make()
    for index in range(1, MAX_HELD + 2):
        completion.deliver(token(index), 0.0)
    assert (events.gaps, events.arrived) == (1, 0)


def test_a_new_attempt_forgets_what_the_old_one_left_waiting() -> None:
    completion, _ = make()
    completion.deliver(token(0), 0.0)
    completion.deliver(token(2), 0.0)
    completion.withdraw("failure")
    assert (completion.attempt, completion.attempt_number, completion.attempts) == (None, 0, 1)
    begin(completion, 2)
    completion.deliver(token(1), 0.0)
    assert completion.token_ids.tolist() == [100, 101]


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_may_end_and_only_the_table_s_moves_are_made(stage: Stage) -> None:
    completion, _ = make()
    for target in Stage:
        completion.stage = stage
        if target in MOVES[stage]:
            completion.move_to(target)
        else:
            with pytest.raises(AssertionError):
                completion.move_to(target)
    assert stage is Stage.ENDED or Stage.ENDED in MOVES[stage]
