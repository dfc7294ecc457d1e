"""What a worker's load is taken for between its reports: estimates, and the stakes of attempts in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.work import PageCounts, WorkerLoad
from router.fleet.estimate import Estimate
from router.fleet.pace import Pace
from router.fleet.placement import Pair
from router.stake import Stake
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_begins_after_a_report_is_added_and_what_ends_is_taken_in_proportion() -> None:
    estimate = Estimate()
    first, second = estimate.begin(30), estimate.begin(10)
    assert (estimate.value, estimate.ours) == (40, 40)
    estimate.report(100)  # Others' 20 and ours, grown from 40 to 80.
    assert estimate.value == 100
    third = estimate.begin(5)
    assert (estimate.value, estimate.ours) == (105, 45)
    first.end()
    first.end()
    assert (estimate.value, estimate.ours) == (30, 15)
    third.end(2)
    assert (third.amount, estimate.value) == (3, 28)
    second.end()
    third.end()
    assert (estimate.value, estimate.ours) == (0, 0)
    estimate.report(20)
    assert estimate.value == 20


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "part", "report"]), st.integers(0, 50)), max_size=60))
def test_an_estimate_is_never_negative_and_our_part_is_exact(moves: list[tuple[str, int]]) -> None:
    estimate, parts = Estimate(), []
    for move, amount in moves:
        if move == "begin":
            parts.append(estimate.begin(amount))
        elif move == "report":
            estimate.report(amount)
        elif parts:
            parts[amount % len(parts)].end(None if move == "end" else amount)
        assert estimate.value >= 0 and estimate.ours == sum(part.amount for part in parts)
    for part in parts:
        part.end()
    assert estimate.ours == 0


def test_an_attempt_is_coming_until_it_has_joined_and_frees_its_prefill_worker_then() -> None:
    clock, freed = Clock(), list[int]()
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100, max_running=10)
    stake = Stake(Pair(p, d), members=2, tokens=60, pages=6, clock=clock, on_freed=freed.append)
    assert (p.queued_tokens, p.requests, d.requests, d.available_pages) == (60, 1, 2, 94)
    stake.cached(20)
    assert p.queued_tokens == 40
    d.report(WorkerLoad(waiting=2, pages=PageCounts(94, 6, 0, 0, 100)))
    assert (d.requests, d.available_pages) == (4, 88), "on its way they count beside what may be them already"

    clock.now = 4.0
    stake.joined()
    stake.joined()
    assert freed == [40]
    assert (p.queued_tokens, p.requests) == (0, 0)
    assert (d.coming.requests, d.coming.pages) == (0, 0)
    d.report(WorkerLoad(running=2, pages=PageCounts(90, 10, 0, 0, 100)))
    assert (d.requests, d.available_pages) == (2, 90)
    stake.left(had_joined=True, is_computed=True)
    assert (d.requests, d.available_pages) == (1, 95)
    stake.left(had_joined=True, is_computed=True)
    assert (d.requests, d.available_pages, freed) == (0, 100, [40, 0, 0])


def test_what_is_cached_counts_once_however_often_it_is_told() -> None:
    clock, freed = Clock(), list[int]()
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100)
    stake = Stake(Pair(p, d), members=1, tokens=60, pages=6, clock=clock, on_freed=freed.append)
    stake.cached(20)
    stake.cached(20)  # Told by the prefill worker, and again by a decode worker whose stream overtook it.
    assert p.queued_tokens == 40
    stake.joined()
    stake.left(had_joined=True, is_computed=True)
    assert freed == [40, 0]


def test_a_cancelled_attempt_gives_back_everything_and_is_no_measure_of_pace() -> None:
    clock, freed = Clock(), list[int]()
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100)
    stake = Stake(Pair(p, d), members=1, tokens=60, pages=6, clock=clock, on_freed=freed.append)
    clock.now = 9.0
    stake.left(had_joined=False, is_computed=False)
    assert (p.queued_tokens, p.requests, d.requests, d.available_pages) == (0, 0, 0, 100)
    assert set(freed) == {0}


@settings(deadline=None)
@given(
    st.sampled_from(["pair", "alone", "no decode"]),
    st.integers(1, 4),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_whatever_becomes_of_its_members_nothing_of_a_stake_is_left(
    kind: str, members: int, fates: list[tuple[bool, bool]], reports: list[int]
) -> None:
    p, d, c = worker("p", "prefill"), worker("d", "decode"), worker("c", "decode", alone=True)
    pair = {"pair": Pair(p, d), "alone": Pair(c, c), "no decode": Pair(p, None)}[kind]
    stake = Stake(pair, members=members, tokens=7, pages=5, on_freed=lambda tokens: None)
    for number, (joins, is_computed) in enumerate(fates[:members]):
        joins = joins and pair.decode is not None
        if number in reports:
            for made in (p, d, c):
                made.report(WorkerLoad(running=1, queued_tokens=3))
        if joins:
            stake.joined()
        stake.left(had_joined=joins, is_computed=is_computed or joins)
    for made in (p, d, c):
        ours: list[Any] = [made.tokens.ours, made.completions.ours, made.pages.ours, made.coming.requests, made.coming.pages]
        assert ours == [0] * 5


def test_pace_is_measured_over_busy_time_and_forgets() -> None:
    def seconds(tokens: int) -> float | None:
        return pace.seconds_for(prompts=1000, tokens=tokens)

    pace = Pace()
    pace.note(0.0, is_busy=False, prompts=5, tokens=500)
    pace.note(100.0, is_busy=True)
    pace.note(100.2, is_busy=True, prompts=3, tokens=20)
    assert seconds(100) is None, "too little was measured"
    pace.note(104.0, is_busy=False, prompts=3, tokens=380)
    assert seconds(100) == pytest.approx(1, rel=0.02)
    pace.note(500.0, is_busy=True)
    assert seconds(100) == pytest.approx(1, rel=0.02), "idle time is no slowness"
    for second in range(501, 561):
        pace.note(float(second), is_busy=True, prompts=1, tokens=10)
    assert seconds(100) == pytest.approx(10, rel=0.1)


def test_tiny_prompts_say_nothing_of_how_fast_a_long_one_is_and_long_ones_nothing_of_tiny_ones() -> None:
    tiny, long = Pace(), Pace()
    for pace, tokens in ((tiny, 1), (long, 10_000)):
        pace.note(0.0, is_busy=True)
        for second in range(1, 11):
            pace.note(float(second), is_busy=True, prompts=1, tokens=tokens)
    assert tiny.seconds_for(prompts=1, tokens=2000) == pytest.approx(1)
    assert long.seconds_for(prompts=100, tokens=100) == pytest.approx(0.01)
    assert tiny.seconds_for(prompts=20, tokens=20) == pytest.approx(20)
    assert long.seconds_for(prompts=2, tokens=15_000) == pytest.approx(1.5)
