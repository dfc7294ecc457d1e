"""Short prompts that go to a decode worker alone: which, when and where."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from router.fleet.local_prefill import LocalPrefill
from router.fleet.placement import Ask, Pair, seats_for
from router.fleet.policies import Placer
from router.fleet.prompt_blocks import PromptBlocks
from router.fleet.roster import Roster
from router.fleet.workers import Worker
from router.queueing.room import RoomRule
from router.queueing.turns import next_turn
from tests.helpers.waiters import waiter
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit

BUSY = 1000


def ask_of(length: int, *, first: int = 0) -> Ask:
    return Ask(1, prompt=PromptBlocks(array("i", [first, *range(length - 1)])))


def offering(worker_id: str, tokens: int = 256, **load: Any) -> Worker:
    made = worker(worker_id, "decode", **load)
    made.profile = replace(made.profile, local_prefill_tokens=tokens)
    return made


def chosen(local: LocalPrefill, workers: list[Worker], ask: Ask, *, pages: int | None = 1) -> str | None:
    seats = seats_for(workers, ask)
    assert seats is not None
    pair = local.pair_for(seats, ask, pages=pages)
    assert pair is None or pair.is_alone
    return pair and pair.prefill.id


def test_only_while_every_prefill_worker_is_busy_and_only_short_ones() -> None:
    p1, p2, d = worker("p1", "prefill", queued_tokens=BUSY), worker("p2", "prefill", queued_tokens=BUSY - 1), offering("d")
    local = LocalPrefill(queue_tokens=BUSY)
    assert chosen(local, [p1, p2, d], ask_of(255)) is None
    p2.tokens.begin(1)
    assert chosen(local, [p1, p2, d], ask_of(255)) == "d"
    assert chosen(local, [p1, p2, d], ask_of(256)) is None


def test_no_more_than_the_worker_says_that_it_takes() -> None:
    p, d = worker("p", "prefill", queued_tokens=BUSY), offering("d")
    d.profile = replace(d.profile, max_requests=2)
    local = LocalPrefill(queue_tokens=BUSY)
    d.coming.requests = 1
    assert chosen(local, [p, d], ask_of(9)) == "d"
    d.coming.requests = 2
    assert chosen(local, [p, d], ask_of(9)) is None, "it would hand it back"


def test_only_decode_workers_that_offer_it_and_of_those_the_least_full() -> None:
    p = worker("p", "prefill", queued_tokens=BUSY)
    plain, fuller, free = worker("d0", "decode"), offering("d1", running=3), offering("d2", running=1)
    local = LocalPrefill(queue_tokens=BUSY)
    assert chosen(local, [p, plain], ask_of(9)) is None
    assert chosen(local, [p, plain, fuller, free], ask_of(9)) == "d2"


def test_a_decode_worker_without_pages_a_place_or_time_takes_none() -> None:
    p, local = worker("p", "prefill", queued_tokens=BUSY), LocalPrefill(queue_tokens=BUSY)
    assert chosen(local, [p, offering("d", free=4)], ask_of(9), pages=5) is None
    assert chosen(local, [p, offering("d", free=4)], ask_of(9), pages=4) == "d"
    assert chosen(local, [p, offering("d", running=8)], ask_of(9)) is None
    assert chosen(local, [p, offering("d", queued_tokens=256)], ask_of(9)) is None


def test_a_long_prompt_of_which_most_is_cached_is_short_where_it_is_cached() -> None:
    p, d1, d2 = worker("p", "prefill", queued_tokens=BUSY), offering("d1", running=5), offering("d2")
    local, ask = LocalPrefill(queue_tokens=BUSY), ask_of(1000)
    assert chosen(local, [p, d1, d2], ask) is None
    local.took(Pair(p, d1), ask)
    assert chosen(local, [p, d1, d2], ask_of(1100)) == "d1"
    assert chosen(local, [p, d1, d2], ask_of(1300)) is None, "960 are cached, 340 are left"
    assert chosen(local, [p, d1, d2], ask_of(1000, first=7)) is None
    local.flushed()
    assert chosen(local, [p, d1, d2], ask) is None
    local.took(Pair(p, d1), ask)
    local.left("d1")
    assert chosen(local, [p, d1, d2], ask) is None


def test_a_request_that_needs_no_decode_worker_is_left_to_the_prefill_workers() -> None:
    p = worker("p", "prefill", queued_tokens=BUSY)
    assert chosen(LocalPrefill(queue_tokens=BUSY), [p, offering("d")], ask_of(9)._replace(needs_decode=False)) is None


def test_a_short_one_goes_by_those_that_wait_for_a_prefill_worker_and_takes_none_from_them() -> None:
    workers = [worker("p", "prefill", queued_tokens=BUSY), offering("d")]
    placer = Placer("round_robin", seed=1, local=LocalPrefill(queue_tokens=BUSY))
    long, short = waiter(5000, ask=ask_of(5000))[0], waiter(9, ask=ask_of(9))[0]
    found = next_turn([long, short], Roster(workers), rule=RoomRule(BUSY), placer=placer)
    assert found is not None and (found.waiter, found.bypassed) == (short, ())
    assert (found.pair.prefill.id, found.pair.decode and found.pair.decode.id) == ("d", "d")
    workers[1].tokens.begin(256)
    assert next_turn([long, short], Roster(workers), rule=RoomRule(BUSY), placer=placer) is None


def test_without_the_rule_nothing_is_computed_there() -> None:
    workers = [worker("p", "prefill", queued_tokens=BUSY), offering("d")]
    short, _ = waiter(9, ask=ask_of(9))
    assert next_turn([short], Roster(workers), rule=RoomRule(BUSY), placer=Placer("least_load", seed=1)) is None
