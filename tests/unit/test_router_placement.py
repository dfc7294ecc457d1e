"""The choice of a pair, as a function of values."""

from __future__ import annotations

from typing import Any

import pytest

from common.work import Compatibility, PageCounts, Role, WorkerLoad, WorkerProfile
from router.placement import Ask, choose
from router.workers import Worker

pytestmark = pytest.mark.unit

SAME = Compatibility("f", "float32", 16, 1024, 2, 2, 16)


def worker(
    worker_id: str,
    role: Role,
    *,
    pages: int = 100,
    session: bool = True,
    max_running: int = 8,
    free: int | None = None,
    alone: bool = False,
    **load: Any,
) -> Worker:
    address = f"127.0.0.1:{hash(worker_id) % 60000}"
    made = Worker(WorkerProfile(worker_id, role, address, SAME, "cpu", pages, max_running, "0", local_prefill=alone))
    free = pages if free is None else free
    made.load = WorkerLoad(**load, pages=PageCounts(free, pages - free, 0, 0, pages))
    made.has_session = session
    return made


def ids(*workers: Worker, ask: Ask | None = None) -> tuple[str, str] | None:
    pair = choose(workers, ask or Ask(pages=1))
    return pair and (pair.prefill.id, pair.decode.id if pair.decode else "")


def test_the_fewest_queued_tokens_and_the_fewest_requests_win() -> None:
    p1, p2 = worker("p1", "prefill", queued_tokens=500), worker("p2", "prefill", queued_tokens=100, waiting=9)
    d1, d2 = worker("d1", "decode", running=3), worker("d2", "decode", running=2)
    assert ids(p1, p2, d1, d2) == ("p2", "d2")


def test_equal_requests_go_to_more_free_pages_and_full_ties_to_the_first_id() -> None:
    p = worker("p", "prefill")
    assert ids(p, worker("d1", "decode", free=10), worker("d2", "decode", free=20)) == ("p", "d2")
    assert ids(p, worker("d2", "decode"), worker("d1", "decode")) == ("p", "d1")


def test_a_larger_batch_takes_more_requests() -> None:
    small, large = worker("d1", "decode", running=2, max_running=4), worker("d2", "decode", running=3, max_running=64)
    assert ids(worker("p", "prefill"), small, large) == ("p", "d2")


def test_what_was_sent_since_the_last_report_counts_until_the_next_one() -> None:
    p1, p2, d = worker("p1", "prefill"), worker("p2", "prefill"), worker("d", "decode")
    p1.note_sent(requests=1, tokens=50, pages=0)
    assert ids(p1, p2, d) == ("p2", "d")
    p1.report(WorkerLoad())
    assert ids(p1, p2, d) == ("p1", "d")


def test_workers_of_failed_attempts_are_avoided_unless_there_is_nobody_else() -> None:
    p, d1, d2 = worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode", running=7)
    assert ids(p, d1, d2, ask=Ask(1, avoid=frozenset({"p", "d1"}))) == ("p", "d2")


@pytest.mark.parametrize("unusable", ["no session", "draining", "lost", "too small"])
def test_a_worker_that_cannot_take_it_is_never_chosen(unusable: str) -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", session=unusable != "no session", pages=100)
    if unusable == "draining":
        d.load = WorkerLoad(draining=True)
    if unusable == "lost":
        d.lost_at = 1.0
    assert ids(p, d, ask=Ask(pages=101 if unusable == "too small" else 1)) is None


def test_a_single_token_needs_no_decode_worker() -> None:
    assert ids(worker("p", "prefill"), ask=Ask(1, needs_decode=False)) == ("p", "")
    assert ids(worker("p", "prefill")) is None


def test_a_worker_that_prefills_itself_is_a_pair_alone_and_the_least_loaded_is_chosen() -> None:
    c1, c2 = worker("c1", "decode", alone=True, running=3), worker("c2", "decode", alone=True, running=2)
    assert ids(c1, c2) == ("c2", "c2")
    assert ids(c1, c2, ask=Ask(1, needs_decode=False)) == ("c2", "")
    assert ids(c1, c2, ask=Ask(1, avoid=frozenset({"c2"}))) == ("c1", "c1")
    c1.load = WorkerLoad(running=2, pages=c1.load.pages)
    c2.note_sent(requests=0, tokens=900, pages=0)
    assert ids(c1, c2) == ("c1", "c1")


def test_a_pair_of_two_and_a_worker_alone_compete_by_load_and_the_two_win_a_tie() -> None:
    p, d, c = worker("p", "prefill"), worker("d", "decode"), worker("c", "decode", alone=True)
    assert ids(p, d, c) == ("p", "d")
    assert ids(p, c) == ("c", "c"), "it is no part of another pair"
    d.note_sent(requests=1, tokens=0, pages=0)
    assert ids(p, d, c) == ("c", "c")
    c.note_sent(requests=2, tokens=10, pages=0)
    assert ids(p, d, c) == ("p", "d")
    assert ids(p, d, c, ask=Ask(1, avoid=frozenset({"p"}))) == ("c", "c")
    p.note_sent(requests=1, tokens=50, pages=0)
    assert ids(p, d, c, ask=Ask(1, needs_decode=False)) == ("c", "")
