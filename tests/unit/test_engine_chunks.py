"""The chunk planner and the finish rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.core import Req, SamplingParams
from common.engine.chunks import plan_chunks, remaining
from common.engine.finish import finish_reason
from common.work import FinishReason


def make_req(tokens: int, *, uid: int = 0, priority: int = 0, cached: int = 0, sampling: SamplingParams | None = None) -> Req:
    params = sampling or SamplingParams(max_tokens=4)
    return Req(torch.zeros(tokens, dtype=torch.int32), 0, cached, params.max_tokens, uid, params, None, priority=priority)


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    long, short = make_req(10_000, uid=1), make_req(20, uid=2)
    assert dict(plan_chunks([long, short], budget_tokens=256))[short] == 20


def test_the_oldest_advances_however_many_short_ones_come() -> None:
    reqs = [make_req(10_000, uid=0), *(make_req(200, uid=i) for i in range(1, 9))]
    assert dict(plan_chunks(reqs, budget_tokens=256))[reqs[0]] >= 64


def test_priority_goes_before_length() -> None:
    oldest, urgent, short = make_req(1000, uid=0), make_req(500, uid=1, priority=1), make_req(10, uid=2)
    assert dict(plan_chunks([oldest, urgent, short], budget_tokens=100)) == {oldest: 25, urgent: 75}


def test_nothing_to_do_plans_nothing() -> None:
    assert plan_chunks([], budget_tokens=8) == []


@given(lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(-1, 1)), min_size=1, max_size=12), budget=st.integers(1, 300))
def test_a_plan_fills_the_budget_and_gives_nobody_more_than_remains(lengths: list[tuple[int, int]], budget: int) -> None:
    reqs = [make_req(n, uid=i, priority=p) for i, (n, p) in enumerate(lengths)]
    plan = plan_chunks(reqs, budget_tokens=budget)
    assert sum(n for _, n in plan) == min(budget, sum(map(remaining, reqs)))
    assert all(1 <= n <= remaining(req) for req, n in plan)
    assert len({id(req) for req, _ in plan}) == len(plan)
    assert reqs[0] in dict(plan)


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        (SamplingParams(max_tokens=3), [5, 5], None),
        (SamplingParams(max_tokens=3), [5, 5, 5], FinishReason.LENGTH),
        (SamplingParams(max_tokens=3), [5, 99], FinishReason.STOP),
        (SamplingParams(max_tokens=2, ignore_eos=True), [5, 99], FinishReason.LENGTH),
        (SamplingParams(max_tokens=3, stop_token_ids=(7,)), [7], FinishReason.STOP),
        (SamplingParams(max_tokens=3, stop_token_ids=(7,), ignore_eos=True), [7], FinishReason.STOP),
        (SamplingParams(max_tokens=4, min_tokens=3), [5, 99], None),
        (SamplingParams(max_tokens=4, min_tokens=2), [5, 99], FinishReason.STOP),
    ],
)
def test_a_completion_ends_for_the_right_reason(params: SamplingParams, tokens: list[int], reason: FinishReason | None) -> None:
    req = make_req(6, sampling=params)
    for token in tokens:
        req.complete_one()
        req.append_host(torch.tensor([token], dtype=torch.int32))
    assert finish_reason(req, tokens[-1], {99}) is reason


def test_usg_01_eos_as_the_last_allowed_token_is_a_stop() -> None:
    req = make_req(6, sampling=SamplingParams(max_tokens=1))
    req.complete_one()
    req.append_host(torch.tensor([99], dtype=torch.int32))
    assert finish_reason(req, 99, {99}) is FinishReason.STOP
