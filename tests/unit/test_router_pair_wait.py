"""How long a request waits for a pair while there is none."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from common.work import WorkerLoad
from router.fleet.arrivals import Arrival
from router.fleet.pair_wait import PairWait
from router.fleet.workers import Departure, Worker
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit

WAIT = PairWait(pair_wait=timedelta(seconds=2), return_wait=timedelta(seconds=30))
ASKED = 100.0
P = worker("p", "prefill")


def gone(departure: Departure, *, at: float = ASKED) -> Worker:
    made = worker("d", "decode", session=False)
    made.lost_at, made.departure = at, departure
    return made


def wait(*workers: Worker, starting: Sequence[Arrival] = (), now: float = ASKED, is_begun: bool = False) -> float:
    return WAIT.until([P, *workers], starting, asked_at=ASKED, now=now, is_begun=is_begun) - ASKED


def test_nobody_and_a_crashed_worker_are_waited_for_a_little() -> None:
    assert wait() == wait(gone(Departure.BROKEN)) == wait(gone(Departure.BROKEN), is_begun=True) == 2


def test_a_worker_that_left_in_order_is_expected_back_for_its_whole_time() -> None:
    assert wait(gone(Departure.IN_ORDER)) == 30
    assert wait(gone(Departure.IN_ORDER, at=ASKED - 25)) == 5
    assert wait(gone(Departure.IN_ORDER, at=ASKED - 60)) == 2


def test_a_draining_worker_is_about_to_leave_but_nobody_waits_for_ever() -> None:
    draining = worker("d", "decode")
    draining.load = WorkerLoad(draining=True)
    assert wait(draining) == wait(draining, now=ASKED + 29) == 30


@pytest.mark.parametrize(("is_begun", "expected"), [(False, 2), (True, 30)])
def test_a_silent_worker_is_waited_for_by_those_that_have_begun(is_begun: bool, expected: float) -> None:
    unreachable = worker("d", "decode", session=False)
    unreachable.trouble = "a ping was not answered"
    assert wait(unreachable, is_begun=is_begun) == wait(gone(Departure.SILENT), is_begun=is_begun) == expected


def test_a_worker_of_a_role_that_is_there_anyway_is_not_waited_for() -> None:
    assert wait(gone(Departure.IN_ORDER), worker("d2", "decode")) == 2


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_worker_that_is_starting_is_waited_for_whether_another_was_there_or_not(is_begun: bool) -> None:
    starting = [Arrival("decode", since=ASKED + 1)]
    assert wait(starting=starting, is_begun=is_begun) == 30, "but nobody waits for ever"
    assert wait(gone(Departure.BROKEN), starting=starting, is_begun=is_begun) == 30
    assert wait(gone(Departure.BROKEN), starting=[Arrival("decode", since=ASKED - 20)], is_begun=is_begun) == 10


def test_where_both_roles_are_missing_the_one_with_less_hope_decides() -> None:
    lost = worker("p", "prefill", session=False)
    lost.lost_at, lost.departure = ASKED, Departure.BROKEN
    starting = [Arrival("decode", since=ASKED)]
    until = WAIT.until([lost, gone(Departure.BROKEN)], starting, asked_at=ASKED, now=ASKED, is_begun=False)
    assert until - ASKED == 2, "nobody comes for the prefill worker"
    starting.append(Arrival("prefill", since=ASKED - 10))
    until = WAIT.until([lost, gone(Departure.BROKEN)], starting, asked_at=ASKED, now=ASKED, is_begun=False)
    assert until - ASKED == 20


def test_a_worker_that_does_both_is_waited_for_alone() -> None:
    both = worker("c", "decode", alone=True, session=False)
    both.lost_at, both.departure = ASKED, Departure.IN_ORDER
    assert WAIT.until([both], [], asked_at=ASKED, now=ASKED, is_begun=False) - ASKED == 30
    first = [Arrival("decode", since=ASKED)]
    assert WAIT.until([], first, asked_at=ASKED, now=ASKED, is_begun=False) - ASKED == 30, "it may be one"


def test_a_worker_that_has_been_starting_for_too_long_or_is_of_another_role_is_not_waited_for() -> None:
    assert wait(starting=[Arrival("decode", since=ASKED - 60)]) == 2
    assert wait(starting=[Arrival("prefill", since=ASKED)]) == 2


def test_one_that_has_registered_is_given_the_time_to_open_its_session() -> None:
    joining = worker("d", "decode", session=False)
    joining.joined_at = ASKED + 1.9
    assert wait(joining) == pytest.approx(3.9)
