"""Who may take a request, as a function of values."""

from __future__ import annotations

import pytest

from common.work import WorkerLoad
from router.fleet.placement import Ask, Seats, seats_for
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


def ids(seats: Seats | None) -> tuple[str, str, str] | None:
    """Per group, with a blank between."""
    return seats and tuple(" ".join(worker.id for worker in group) for group in seats)  # type: ignore[return-value]


def test_workers_are_grouped_by_what_they_do_and_ordered_by_id() -> None:
    p2, p1, d, c = worker("p2", "prefill"), worker("p1", "prefill"), worker("d", "decode"), worker("c", "decode", alone=True)
    assert ids(seats_for([p2, c, d, p1], Ask(1))) == ("p1 p2", "d", "c")


@pytest.mark.parametrize("unusable", ["no session", "draining", "lost", "too small"])
def test_a_worker_that_cannot_take_it_has_no_seat(unusable: str) -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", session=unusable != "no session", pages=100)
    if unusable == "draining":
        d.load = WorkerLoad(draining=True)
    if unusable == "lost":
        d.lost_at = 1.0
    assert seats_for([p, d], Ask(pages=101 if unusable == "too small" else 1)) is None


def test_a_prefill_worker_has_a_seat_only_with_the_decode_worker_it_needs() -> None:
    p, d, c = worker("p", "prefill"), worker("d", "decode"), worker("c", "decode", alone=True)
    assert ids(seats_for([p], Ask(1, needs_decode=False))) == ("p", "", "")
    assert ids(seats_for([p, d, c], Ask(1, needs_decode=False))) == ("p", "", "c")
    assert seats_for([p], Ask(1)) is None and seats_for([d], Ask(1)) is None
    assert ids(seats_for([p, c], Ask(1))) == ("", "", "c"), "a worker that is a pair alone is no part of another"


@pytest.mark.parametrize(
    ("avoid", "left"),
    [
        ("", ("p", "d1 d2", "c")),
        ("d1", ("p", "d2", "c")),
        ("c", ("p", "d1 d2", "")),
        ("p", ("", "", "c")),
        ("d1 d2", ("", "", "c")),
        ("p d1 c", ("p", "d2", "c")),
        ("p d1 d2 c", ("p", "d1 d2", "c")),
    ],
)
def test_workers_of_failed_attempts_are_avoided_unless_there_is_nobody_else(avoid: str, left: tuple[str, str, str]) -> None:
    workers = [worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode"), worker("c", "decode", alone=True)]
    assert ids(seats_for(workers, Ask(1, avoid=frozenset(avoid.split())))) == left
