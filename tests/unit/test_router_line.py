"""The line: priorities, tenants, places kept, and who gives way when it is full."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.queueing.line import Line
from router.queueing.waiter import Waiter
from tests.helpers.waiters import waiter

pytestmark = pytest.mark.unit


def add(line: Line, tokens: int = 10, *, tenant: str = "", priority: int = 0, is_begun: bool = False) -> Waiter:
    made, _ = waiter(tokens, tenant=tenant, priority=priority, is_begun=is_begun)
    line.add(made)
    return made


def serve(line: Line) -> Waiter:
    first = line.leading(1)[0]
    line.remove(first, goes=True)
    return first


def drain(line: Line) -> list[Waiter]:
    return [serve(line) for _ in range(len(line))]


def test_one_tenant_is_served_in_order_of_arrival_and_higher_priorities_first() -> None:
    line = Line()
    low, first, second, high = add(line, priority=-1), add(line, 500), add(line, 1), add(line, 900, priority=2)
    assert drain(line) == [high, first, second, low] and (line.prompts, line.tokens) == (0, 0)


def test_a_tenant_with_much_in_line_does_not_keep_the_others_waiting() -> None:
    line = Line()
    flood = [add(line, 100, tenant="a") for _ in range(10)]
    late = [add(line, 100, tenant="b") for _ in range(2)]
    order = drain(line)
    assert order[:4] == [flood[0], late[0], flood[1], late[1]]


def test_shares_are_of_prompt_tokens_not_of_requests() -> None:
    line = Line()
    for _ in range(40):
        add(line, 400, tenant="large")
    for _ in range(400):
        add(line, 40, tenant="small")
    tokens, count = Counter[str](), Counter[str]()
    for _ in range(110):
        served = serve(line)
        tokens[served.tenant] += served.tokens
        count[served.tenant] += 1
    assert abs(tokens["large"] - tokens["small"]) <= 440 and count["small"] > 9 * count["large"]


sizes = st.lists(st.integers(1, 500), min_size=1, max_size=30)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), sizes, min_size=2), st.randoms(use_true_random=False))
def test_backlogged_tenants_are_never_further_apart_than_their_largest_prompts(
    prompts: dict[str, list[int]], random: object
) -> None:
    """The fairness of the paper (theorem 1): over any time in which two have something in line, |W_f - W_g| <= l_f + l_g."""
    line = Line()
    for tenant, tokens in prompts.items():
        for size in tokens:
            add(line, size, tenant=tenant)
    served: Counter[str] = Counter()
    left = {tenant: len(tokens) for tenant, tokens in prompts.items()}
    while all(left.values()):
        one = serve(line)
        served[one.tenant] += one.tokens
        left[one.tenant] -= 1
        for f in prompts:
            for g in prompts:
                if left[f] and left[g]:
                    assert abs(served[f] - served[g]) <= max(prompts[f]) + max(prompts[g])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(1, 90), st.integers(0, 3)), max_size=60))
def test_nobody_is_lost_and_whoever_leaves_is_gone(moves: list[tuple[int, str, int, int]]) -> None:
    line, there = Line(), list[Waiter]()
    for priority, tenant, tokens, move in moves:
        if move == 3 and there:
            gone = there.pop(tokens % len(there))
            line.remove(gone, goes=False)
            assert gone not in line
        elif move == 2 and there:
            there.remove(serve(line))
        else:
            there.append(add(line, tokens, tenant=tenant, priority=priority))
        assert len(line) == len(there) and all(made in line for made in there)
        assert (line.prompts, line.tokens) == (len(there), sum(made.tokens for made in there))
        priorities = [made.priority for made in line.all()]
        assert priorities == sorted(priorities, reverse=True)
    assert sorted(made.uid for made in drain(line)) == sorted(made.uid for made in there)


def test_a_request_that_runs_again_keeps_its_place_by_arrival() -> None:
    line = Line()
    old = add(line, 100)
    assert serve(line) is old
    others = [add(line, 10), add(line, 10, tenant="b")]
    line.add(old)
    assert drain(line) == [old, *others]
    # Also when its level has been empty in the meantime, and others have been served since.
    for _ in range(5):
        add(line, 100, tenant="b")
    drain(line)
    new = add(line, 1, tenant="c")
    line.add(old)
    assert drain(line) == [old, new]


def test_a_tenant_is_not_charged_for_what_left_before_its_turn() -> None:
    line = Line()
    add(line, 10, tenant="b")
    big = add(line, 10_000, tenant="a")
    line.remove(big, goes=False)
    small = add(line, 10, tenant="a")
    later = add(line, 10, tenant="b")
    assert drain(line)[1:] == [small, later]


def test_ahead_are_those_that_go_first_and_have_not_begun() -> None:
    line = Line()
    add(line, 100), add(line, 50, priority=1), add(line, 9, is_begun=True)
    mine = add(line, 7)
    add(line, 1000)
    assert line.ahead_of(mine) == (2, 150) and (line.prompts, line.tokens) == (4, 1157)


def test_names_of_tenants_that_have_gone_are_forgotten() -> None:
    line = Line()
    add(line, 1, tenant="stays")
    for i in range(1000):
        add(line, 10, tenant=f"t{i}")
        serve(line)
    add(line, 1, priority=1)
    (level,) = [level for priority, level in line._levels.items() if priority == 0]
    assert len(level.tenants) < 100


def test_a_newcomer_displaces_the_last_of_the_heaviest_tenant_of_the_lowest_priority() -> None:
    line = Line()
    assert line.displaceable_for(9, "x") is None
    a = [add(line, tenant="a") for _ in range(3)]
    b = add(line, tenant="b")
    high = [add(line, tenant="a", priority=1) for _ in range(9)]
    assert line.displaceable_for(0, "b") is a[2], "b would have two, a has three"
    assert line.displaceable_for(0, "a") is None
    assert line.displaceable_for(-1, "c") is None
    assert line.displaceable_for(1, "a") is a[2], "a higher priority goes first, whoever's it is"
    line.remove(a[2], goes=False)
    assert line.displaceable_for(0, "b") is None, "it would only turn the two around"
    assert line.displaceable_for(0, "c") is a[1]
    for gone in [*a[:2], b]:
        line.remove(gone, goes=False)
    assert line.displaceable_for(1, "c") is high[8]


def test_what_has_begun_is_not_displaced() -> None:
    line = Line()
    begun = [add(line, is_begun=True) for _ in range(3)]
    assert line.displaceable_for(1, "b") is None
    fresh = add(line)
    assert line.displaceable_for(1, "b") is fresh and begun[0] in line


def test_what_has_begun_weighs_nothing_where_others_could_give_way() -> None:
    line = Line()
    for _ in range(3):
        add(line, tenant="a", is_begun=True)
    b = [add(line, tenant="b") for _ in range(2)]
    assert line.displaceable_for(1, "c") is b[1], "not nobody, because a has more in line"
    assert line.displaceable_for(0, "c") is b[1]
    assert line.displaceable_for(0, "a") is b[1], "what a has there has begun and takes nobody's place"

    line = Line()
    add(line, is_begun=True)
    above = add(line, priority=1)
    assert line.displaceable_for(2, "c") is above
    assert line.displaceable_for(0, "c") is None
