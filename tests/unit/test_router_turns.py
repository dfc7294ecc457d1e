"""Whose turn it is: room, bounded bypass, and workers worth waiting for."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.work import WorkerLoad
from router.fleet.estimate import Part
from router.fleet.placement import Ask
from router.fleet.policies import Placer
from router.fleet.prompt_blocks import PromptBlocks
from router.fleet.roster import Roster
from router.fleet.workers import Worker
from router.queueing.line import Line
from router.queueing.room import RoomRule
from router.queueing.turns import MAX_BYPASS, Turn, next_turn
from router.queueing.waiter import Waiter
from tests.helpers.waiters import waiter
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit

RULE = RoomRule(100)


def turn(waiters: list[Waiter], workers: list[Worker], *, policy: Any = "least_load", rule: RoomRule = RULE) -> Turn | None:
    found = next_turn(waiters, Roster(workers), rule=rule, placer=Placer(policy, seed=1))
    for other in found.bypassed if found is not None else ():
        other.bypassed += 1
    return found


def test_a_prefill_worker_takes_a_prompt_of_any_size_while_it_has_less_than_the_bound() -> None:
    large, _ = waiter(5000)
    p, d = worker("p", "prefill", queued_tokens=99), worker("d", "decode")
    assert turn([large], [p, d]) is not None
    p.tokens.begin(1)
    assert turn([large], [p, d]) is None


def test_the_bound_follows_from_the_workers_own_steps() -> None:
    p = worker("p", "prefill", queued_tokens=2048)
    assert not RoomRule().takes_prompt(p)
    p.profile = replace(p.profile, chunk_tokens=8192)
    assert RoomRule().takes_prompt(p)
    p.tokens.begin(16384 - 2048)
    assert not RoomRule().takes_prompt(p)


def test_a_prefill_worker_has_no_more_requests_than_twice_what_it_may_hold() -> None:
    p = worker("p", "prefill", max_running=2, waiting=3)
    assert RULE.takes_prompt(p)
    p.completions.begin(1)
    assert not RULE.takes_prompt(p)
    assert RULE.takes_prompt(worker("c", "decode", alone=True, running=30, max_running=8)), "its places are others'"


def test_a_worker_has_no_more_requests_than_it_says_that_it_takes_and_one_that_does_not_say_as_many_as_before() -> None:
    p = worker("p", "prefill", max_running=8, waiting=2)
    assert RULE.takes_prompt(p), "an older worker does not tell"
    p.profile = replace(p.profile, max_requests=3)
    assert RULE.takes_prompt(p)
    p.completions.begin(1)
    assert not RULE.takes_prompt(p)
    p = worker("p", "prefill")
    p.profile = replace(p.profile, max_requests=1)
    p.completions.begin(1)
    p.report(WorkerLoad(pages=p.load.pages))
    assert not RULE.takes_prompt(p), "its report has crossed the request"
    alone = worker("d", "decode", alone=True, running=30)
    alone.profile = replace(alone.profile, max_requests=3)
    alone.coming.requests = 2
    assert RULE.takes_prompt(alone), "what runs has no prompt in its line any more"
    alone.coming.requests = 3
    assert not RULE.takes_prompt(alone)


def test_a_large_request_without_pages_is_bypassed_so_often_and_then_goes_first() -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100, free=20)
    large, _ = waiter(pages=60, pool=80)
    for _ in range(MAX_BYPASS):
        small, _ = waiter(pages=5)
        found = turn([large, small], [p, d])
        assert found is not None and (found.waiter, found.bypassed) == (small, (large,))
    small, _ = waiter(pages=5)
    found = turn([large, small], [p, d])
    assert found is not None and found.waiter is large
    assert found.pair.decode is d, "it waits for its pages there, where nobody overtakes"


def test_pages_that_are_there_are_the_first_ones() -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100, free=60)
    large, small = waiter(pages=60)[0], waiter(pages=5)[0]
    found = turn([large, small], [p, d])
    assert found is not None and found.waiter is large and not found.bypassed


def test_a_request_takes_no_more_pages_to_begin_with_than_a_pool_has() -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100)
    group, _ = waiter(pages=300, pool=80)
    assert turn([group], [p, d]) is not None
    d.pages.begin(1)
    assert turn([group], [p, d]) is None


def test_whoever_no_worker_could_take_stands_in_nobodys_way_and_is_not_bypassed() -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", pages=100)
    huge, small = waiter(pool=1000)[0], waiter()[0]
    found = turn([huge, small], [p, d])
    assert found is not None and found.waiter is small and huge.bypassed == 0


def test_a_pool_that_is_full_does_not_keep_smaller_requests_from_another() -> None:
    # Only the large pool could ever hold the first one, and it is full; the second begins larger, and ends smaller.
    p, full, other = worker("p", "prefill", pages=900), worker("d1", "decode", pages=900, free=4), worker("d2", "decode")
    first, second = waiter(pages=5, pool=500)[0], waiter(pages=8, pool=50)[0]
    found = turn([first, second], [p, full, other])
    assert found is not None and found.waiter is second and found.pair.decode is other


def test_one_that_needs_no_decode_worker_goes_by_those_that_wait_for_pages() -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", free=0)
    first, single = waiter(pages=1)[0], waiter(pages=1, ask=Ask(1, needs_decode=False))[0]
    found = turn([first, single], [p, d])
    assert found is not None and (found.waiter, found.pair.decode) == (single, None)


class TestHomes:
    """Policies by which some workers are better for a request than others."""

    def cluster(self) -> tuple[list[Worker], dict[str, Waiter]]:
        """Two prefill workers, and for each a request that prefers it."""
        workers = [worker("p0", "prefill"), worker("p1", "prefill"), worker("d", "decode")]
        homes: dict[str, Waiter] = {}
        for i in range(20):
            made, _ = waiter(ask=Ask(1, prompt=PromptBlocks(array("i", [i])), session=str(i)))
            found = turn([made], workers, policy="session")
            assert found is not None
            homes[found.pair.prefill.id] = made
        assert len(homes) == 2
        return workers, homes

    def test_a_request_lets_others_go_while_its_home_has_no_room(self) -> None:
        workers, homes = self.cluster()
        workers[0].tokens.begin(100)
        found = turn([homes["p0"], homes["p1"]], workers, policy="session")
        assert found is not None and (found.waiter, found.bypassed) == (homes["p1"], (homes["p0"],))

    def test_nobody_idles_for_a_preference(self) -> None:
        workers, homes = self.cluster()
        workers[0].tokens.begin(100)
        found = turn([homes["p0"]], workers, policy="session")
        assert found is not None and found.pair.prefill is workers[1]

    def test_and_nobody_waits_for_one_for_long(self) -> None:
        workers, homes = self.cluster()
        workers[0].tokens.begin(100)
        homes["p0"].bypassed = MAX_BYPASS
        found = turn([homes["p0"], homes["p1"]], workers, policy="session")
        assert found is not None and (found.waiter, found.pair.prefill) == (homes["p0"], workers[1])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=40),
    st.sampled_from(["least_load", "session", "prefix", "round_robin", "power_of_two"]),
    st.integers(1, 3),
)
def test_everybody_goes_in_the_end_and_nobody_is_bypassed_more_often_than_allowed(
    wants: list[tuple[int, int]], policy: Any, decodes: int
) -> None:
    """Workers that finish their oldest request whenever nobody can go."""
    workers = [worker("p", "prefill", max_running=100), *(worker(f"d{i}", "decode", pages=40) for i in range(decodes))]
    line, placer = Line(), Placer(policy, seed=1)
    held: list[Part] = []
    for session, pages in wants:
        line.add(waiter(pages=pages, pool=40, ask=Ask(40, session=str(session)))[0])
    while line:
        found = next_turn(line.leading(16), Roster(workers), rule=RULE, placer=placer)
        if found is None:
            assert held, "nobody runs and nobody may go"
            held.pop(0).end()
            continue
        for other in found.bypassed:
            other.bypassed += 1
        assert found.waiter.bypassed <= MAX_BYPASS
        line.remove(found.waiter, goes=True)
        placer.took(found.pair, found.waiter.ask)
        assert found.pair.decode is not None
        held.append(found.pair.decode.pages.begin(found.waiter.pages))
