"""When a worker's circuit opens, tries and closes, and what is no fault of a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import (
    Aborted,
    DataLoss,
    InvalidArgument,
    Leaving,
    PdserveError,
    RemoteOutOfRange,
    ResourceExhausted,
    Unavailable,
)
from router.fleet.circuit import (
    FAULTS_TO_OPEN,
    FIRST_PAUSE_SECONDS,
    FORGET_SECONDS,
    LONE_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    TOGETHER_SECONDS,
    Breaker,
    Circuit,
    is_fault,
    waits,
    willing,
)
from router.fleet.circuits import Circuits
from router.fleet.placement import Pair
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class Stand:
    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = Breaker(lambda: self.now)

    def fail(self, times: int = 1, *, share: float = 1.0, apart: float = 1.0) -> bool:
        opened = False
        for _ in range(times):
            self.now += apart
            opened = self.breaker.failed("no answer", share=share)
        return opened

    def open(self) -> None:
        assert self.fail(int(FAULTS_TO_OPEN))


def test_it_opens_at_the_third_fault_in_a_row_and_a_success_in_between_forgives() -> None:
    stand = Stand()
    stand.fail(2)
    stand.breaker.succeeded()
    assert not stand.fail(2) and stand.breaker.lets_through
    assert stand.fail() and not stand.breaker.lets_through
    assert stand.breaker.circuit == "open"
    assert stand.breaker.last_fault == "no answer"


def test_many_requests_that_fail_together_are_one_fault() -> None:
    stand = Stand()
    stand.fail(100, apart=TOGETHER_SECONDS / 1000)
    assert stand.breaker.circuit is Circuit.CLOSED


def test_faults_of_long_ago_are_forgotten() -> None:
    stand = Stand()
    stand.fail(10, apart=FORGET_SECONDS + 1)
    assert stand.breaker.circuit is Circuit.CLOSED


def test_who_is_only_suspected_opens_after_twice_as_many() -> None:
    stand = Stand()
    assert not stand.fail(int(2 * FAULTS_TO_OPEN) - 1, share=0.5)
    assert stand.fail(share=0.5)


def test_after_the_pause_one_request_tries_and_decides() -> None:
    stand = Stand()
    stand.open()
    assert stand.breaker.seconds_until_try == FIRST_PAUSE_SECONDS
    stand.now += FIRST_PAUSE_SECONDS
    assert stand.breaker.circuit is Circuit.HALF_OPEN and stand.breaker.lets_through
    stand.breaker.sent()
    assert stand.breaker.circuit is Circuit.HALF_OPEN and not stand.breaker.lets_through, "one at a time"
    assert stand.breaker.succeeded()
    assert stand.breaker.circuit is Circuit.CLOSED and stand.breaker.lets_through
    assert not stand.breaker.succeeded()


def test_a_try_that_fails_opens_it_again_for_twice_as_long_up_to_a_bound() -> None:
    stand = Stand()
    stand.open()
    pauses = []
    for _ in range(8):
        stand.now += stand.breaker.seconds_until_try
        stand.breaker.sent()
        assert stand.breaker.failed("again", share=0.5), "one fault of a try is enough, even if it is only suspected"
        pauses.append(stand.breaker.seconds_until_try)
    assert pauses[:3] == [2.0, 4.0, 8.0] and pauses[-1] == LONGEST_PAUSE_SECONDS


def test_a_straggler_s_fault_does_not_prolong_an_open_circuit() -> None:
    stand = Stand()
    stand.open()
    stand.now += 0.5
    assert not stand.breaker.failed("an older request", share=1.0)
    assert stand.breaker.seconds_until_try == FIRST_PAUSE_SECONDS - 0.5


def test_a_try_without_an_outcome_is_followed_by_another() -> None:
    stand = Stand()
    stand.open()
    stand.now += FIRST_PAUSE_SECONDS
    stand.breaker.sent()
    stand.now += FIRST_PAUSE_SECONDS
    assert stand.breaker.lets_through


@pytest.mark.parametrize("has_other", [False, True])
def test_whoever_is_the_last_of_its_role_is_tried_again_soon_however_often_it_has_failed(has_other: bool) -> None:
    stand, lone, other, decode = Stand(), worker("p", "prefill"), worker("q", "prefill"), worker("d", "decode")
    lone.breaker = stand.breaker
    stand.open()
    for _ in range(8):
        stand.now += stand.breaker.seconds_until_try
        stand.breaker.sent()
        stand.breaker.failed("again", share=0.5)
    there = [lone, other, decode]
    other.has_session = has_other
    pause = LONGEST_PAUSE_SECONDS if has_other else LONE_PAUSE_SECONDS
    assert dict(waits(there)) == {lone: pause, other: 0.0, decode: 0.0}
    stand.now += LONE_PAUSE_SECONDS
    assert (lone in willing(there)) is not has_other
    stand.breaker.sent()
    assert lone not in willing(there), "one at a time"


def test_what_is_logged_of_the_last_of_its_role_is_when_it_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    stand, lone, decode = Stand(), worker("p", "prefill"), worker("d", "decode")
    lone.breaker = stand.breaker
    registry: Any = SimpleNamespace(live=[lone, decode], notify=lambda: None)
    stand.open()
    for _ in range(4):
        stand.now += stand.breaker.seconds_until_try
        stand.breaker.sent()
        Circuits(registry).failed(Pair(lone, decode), Unavailable("again"), retryable=True, blame=frozenset({"p"}))
    assert caplog.messages[-1] == f"the circuit of {lone} is open for 2 s: again"


@pytest.mark.parametrize(
    ("error", "retryable", "expected"),
    [
        (Unavailable("no answer"), True, True),
        (PdserveError("internal error on the prefill worker"), True, True),
        (DataLoss("a checksum differs"), True, True),
        (InvalidArgument("top_p"), False, False),
        (RemoteOutOfRange("prompt must fit"), False, False),
        (ResourceExhausted("10000 requests"), True, False),
        (Leaving("draining"), True, False),
        (Aborted("the work was cancelled"), True, False),
    ],
)
def test_a_client_s_mistake_a_full_and_a_leaving_worker_are_no_faults_flt_07(
    error: PdserveError, retryable: bool, expected: bool
) -> None:
    assert is_fault(error, retryable=retryable) is expected
