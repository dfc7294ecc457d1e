"""Attempts whose placing ends after the client has what it needs."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.core import SamplingParams
from common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PdserveError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from common.tracing import NoTracing
from common.work import FinishReason
from router.attempt import Work
from router.attempts import Attempts
from router.completion import PROGRESS_TOKENS, Completion, Stage
from router.dispatch import Dispatch
from router.fleet.circuits import Circuits
from router.fleet.placement import Pair
from router.fleet.registry import Registry
from router.metrics import RouterMetrics
from router.queueing.answers import Answer
from router.queueing.waiter import Place, Waiter
from router.text.output import Output
from router.traces import UNTRACED, RequestTrace
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class OneTurn:
    """A queue in which the first request goes at once, and from then on nobody."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.left: list[Waiter] = []
        self.answers: list[int] = []
        self.delays: list[float] = []
        self.times_held_up = 0
        self.longest_wait = 60.0

    def enter(self, waiter: Waiter) -> None:
        if waiter.place is None:
            waiter.place = Place(-waiter.priority, 0.0, waiter.uid)
        self.waiters.append(waiter)
        if len(self.waiters) == 1:
            waiter.go(Pair(worker("p", "prefill"), worker("d", "decode")))

    def enter_later(self, waiter: Waiter, *, delay_seconds: float) -> None:
        self.waiters.append(waiter)
        self.delays.append(delay_seconds)

    def leave(self, waiter: Waiter) -> None:
        self.left.append(waiter)

    def why_not_again(self, since: float) -> PdserveError | None:
        return ResourceExhausted("waited") if time.monotonic() - since >= self.longest_wait else None

    def freed(self, tokens: int) -> None:
        pass

    def held_up(self) -> None:
        self.times_held_up += 1

    def answered(self, answer: Answer) -> None:
        self.answers.append(answer.tokens)


class NoSessions:
    def __init__(self) -> None:
        self.circuits = Circuits(Registry(fingerprint="f"))

    def session(self, worker: Any) -> None:
        return None


def make(
    queue: Any,
    errors: list[Exception],
    *,
    n: int,
    deadline: float | None = None,
    trace: RequestTrace = UNTRACED,
    max_attempts: int = 3,
) -> tuple[Attempts, list[Completion]]:
    events: Any = None
    completions = [
        Completion(uid=i + 1, number=i, output=Output(None, request_id="r", number=i, logprobs=False), events=events)
        for i in range(n)
    ]
    work = Work(
        router_epoch=1,
        request_id="r",
        prompt=array("i", [1, 2, 3]),
        sampling=SamplingParams(seed=1),
        output_limit=100,
        logprobs=None,
        priority=3,
        page_size=4,
        deadline=deadline,
        trace=trace,
    )
    attempts = Attempts(
        work,
        completions,
        fleet=NoSessions(),  # type: ignore[arg-type]
        queue=queue,
        dispatch=Dispatch(),
        metrics=RouterMetrics(CollectorRegistry()),
        max_attempts=max_attempts,
        on_error=errors.append,
    )
    return attempts, completions


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_completion_that_has_ended_does_not_fail_the_others_for_want_of_a_pair(stopped: bool) -> None:
    queue, errors = OneTurn(), list[Exception]()
    attempts, (first, second) = make(queue, errors, n=2)
    attempts.begin()
    attempts.handed_off(first, 0.0)
    attempts.retracted(first)
    assert len(queue.waiters) == 2, "it waits for a pair again"
    again = queue.waiters[1]

    if stopped:
        attempts.stop(first)  # Its stop string was in what it had.
        assert queue.left == [again]
    else:
        again.refuse(Unavailable("no prefill and decode pair"))

    assert len(errors) == (0 if stopped else 1) and second.stage is Stage.PREFILL
    attempts.close()


async def test_a_request_that_runs_again_keeps_its_place_and_counts_no_failure() -> None:
    queue = OneTurn()
    attempts, (first, second) = make(queue, [], n=2)
    attempts.begin()
    for member in (second, first):
        attempts.handed_off(member, 0.0)
        attempts.retracted(member)
    places = [waiter.place for waiter in queue.waiters]
    assert places == [Place(-3, 0.0, 1), Place(-3, 0.0, 2), Place(-3, 0.0, 1)]
    assert (first.failures, second.failures) == (0, 0) and [waiter.is_begun for waiter in queue.waiters] == [False, True, True]
    attempts.close()
    assert queue.left == queue.waiters[1:]


async def test_what_is_closed_before_its_turn_leaves_the_line(recwarn: pytest.WarningsRecorder) -> None:
    queue = OneTurn()
    queue.waiters.append(None)  # type: ignore[arg-type]  # somebody else had the turn
    attempts, _ = make(queue, [], n=1)
    attempts.begin()
    attempts.close()
    assert queue.left == queue.waiters[1:]
    attempts.close()
    assert not list(recwarn)


async def test_every_wait_in_line_has_its_span_also_one_that_is_cancelled() -> None:
    told = list[tuple[str, str]]()

    class Recorder(NoTracing):
        def stage(self, name: str, *, error: str = "", **attributes: Any) -> None:
            told.append((name, error))

    queue = OneTurn()
    attempts, (first, second) = make(queue, [], n=2, trace=RequestTrace(Recorder(), parent="", arrived_at=0.0))
    attempts.begin()
    for member in (first, second):
        attempts.handed_off(member, 0.0)
        attempts.retracted(member)
    queue.waiters[1].refuse(Unavailable("no prefill and decode pair"))
    attempts.close()
    assert told == [("queue", ""), ("queue", "no prefill and decode pair"), ("queue", "cancelled")]


async def test_a_deadline_that_has_passed_by_its_turn_is_told() -> None:
    errors = list[Exception]()
    attempts, _ = make(OneTurn(), errors, n=1, deadline=time.monotonic() - 1)
    attempts.begin()
    assert [type(error) for error in errors] == [DeadlineExceeded]
    attempts.close()


async def test_an_answer_that_a_stop_string_ends_is_one_and_an_aborted_one_is_none() -> None:
    queue = OneTurn()
    attempts, (first, second) = make(queue, [], n=2)
    attempts.begin()
    for member, finish in ((first, FinishReason.STOP), (second, FinishReason.ABORT)):
        member.token_ids.extend([5, 6, 7])
        member.first_token_at, member.finish = time.monotonic(), finish
        attempts.stop(member)
    assert queue.answers == [3]
    attempts.close()


async def test_loads_are_given_back_however_it_ends() -> None:
    queue = OneTurn()
    attempts, (first, second) = make(queue, [], n=2)
    attempts.begin()
    pair = attempts.pair
    assert pair is not None and pair.decode is not None
    assert (pair.prefill.queued_tokens, pair.decode.requests, pair.decode.coming.pages) == (3, 2, 4)
    attempts.prefill_started(first, 2, 0.0)
    assert pair.prefill.queued_tokens == 1
    attempts.handed_off(first, 0.0)
    assert (pair.prefill.queued_tokens, pair.decode.requests, pair.decode.coming.requests) == (0, 2, 1)
    attempts.finished(first)
    attempts.close()
    assert (pair.decode.requests, pair.decode.coming.pages, pair.decode.pages.ours) == (0, 0, 0)


async def test_an_answer_that_a_fault_held_up_says_nothing_of_what_answers_take() -> None:
    queue = OneTurn()
    attempts, (first, second) = make(queue, [], n=2)
    attempts.begin()
    for member in (first, second):
        attempts.handed_off(member, 0.0)
        member.token_ids.extend([5, 6, 7])
        member.first_token_at = time.monotonic()
    attempts.failed(first, Unavailable("no KV bytes for 10 s"), retryable=True, blame=frozenset())
    attempts.finished(second)
    attempts.finished(first)
    assert queue.answers == [3]


@pytest.mark.parametrize(
    ("error", "times"),
    [(Unavailable("no KV bytes for 10 s"), 1), (ResourceExhausted("full"), 0), (DeadlineExceeded("passed"), 0)],
)
async def test_a_worker_s_fault_voids_the_line_s_pace_and_is_warned_of_and_a_full_one_is_not(
    error: PdserveError, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    queue = OneTurn()
    attempts, (first,) = make(queue, [], n=1)
    attempts.begin()
    attempts.failed(first, error, retryable=True, blame=frozenset())
    assert queue.times_held_up == times
    assert [record.levelname for record in caplog.records] == ["WARNING" if times else "INFO"]


async def test_the_pause_before_the_next_of_many_attempts_stays_short() -> None:
    queue = OneTurn()
    attempts, (first,) = make(queue, [], n=1, max_attempts=100)
    attempts.begin()
    for _ in range(99):
        attempts.failed(first, Unavailable("Socket closed"), retryable=True, blame=frozenset())
        queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("d", "decode")))
    assert queue.delays[:2] == [0.1, 0.2] and max(queue.delays) < 2
    attempts.close()


@pytest.mark.parametrize(("tokens", "is_given_up"), [(PROGRESS_TOKENS, False), (PROGRESS_TOKENS - 1, True)])
async def test_attempts_count_since_one_that_came_far(tokens: int, is_given_up: bool) -> None:
    queue, errors = OneTurn(), list[Exception]()
    attempts, (first,) = make(queue, errors, n=1, max_attempts=3)
    attempts.begin()
    for made in (0, 0, tokens, 0):
        first.token_ids.extend([7] * made)
        attempts.failed(first, Unavailable("Socket closed"), retryable=True, blame=frozenset())
        if not errors:
            queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("d", "decode")))
    assert bool(errors) is is_given_up, "a request that kills its workers makes a token each time"
    attempts.close()


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (FailedPrecondition("no transport serves both"), "WARNING"),
        (Unimplemented("not offered by this version"), "WARNING"),
        (InvalidArgument("top_k must be at least 0"), "INFO"),
        (DeadlineExceeded("passed"), "INFO"),
    ],
)
async def test_what_an_operator_has_to_mend_is_warned_of_and_a_client_s_mistake_is_not(
    error: PdserveError, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    attempts, (first,) = make(OneTurn(), [], n=1)
    attempts.begin()
    attempts.failed(first, error, retryable=False, blame=frozenset())
    assert [record.levelname for record in caplog.records] == [level]


async def test_progress_counts_however_its_attempt_ended() -> None:
    queue, errors = OneTurn(), list[Exception]()
    attempts, (first,) = make(queue, errors, n=1, max_attempts=3)
    attempts.begin()
    for end in ("failure", "failure", "retraction", "failure", "failure"):
        if end == "retraction":
            first.token_ids.extend([7] * PROGRESS_TOKENS)
            attempts.retracted(first)
        else:
            attempts.failed(first, Unavailable("Socket closed"), retryable=True, blame=frozenset())
        assert errors == []
        queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("d", "decode")))
    attempts.failed(first, Unavailable("Socket closed"), retryable=True, blame=frozenset())
    assert [str(error) for error in errors] == ["gave up after 3 attempts; the last: Socket closed"], "each counts once"
    attempts.close()


@pytest.mark.parametrize(("found", "cached"), [([0, 2], 0), ([2, 0], 0), ([2, 3], 2), ([9], 3)], ids=str)
async def test_what_an_earlier_attempt_has_computed_is_not_told_as_cached(found: list[int], cached: int) -> None:
    queue = OneTurn()
    attempts, (first,) = make(queue, [], n=1)
    attempts.begin()
    attempts.prefill_started(first, found[0], 0.0)
    for tokens in found[1:]:
        attempts.failed(first, Unavailable("Socket closed"), retryable=True, blame=frozenset())
        queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("d", "decode")))
        attempts.prefill_started(first, tokens, 0.0)
    assert attempts.cached_tokens == cached
    attempts.close()


async def test_who_failed_it_is_avoided_until_others_have_taken_it_over() -> None:
    queue = OneTurn()
    attempts, (first,) = make(queue, [], n=1)
    attempts.begin()
    attempts.failed(first, Unavailable("Socket closed"), retryable=True, blame=frozenset({"d"}))
    assert queue.waiters[-1].ask.avoid == {"d"}
    queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("e", "decode")))
    attempts.handed_off(first, 0.0)
    attempts.retracted(first)
    assert queue.waiters[-1].ask.avoid == set()
    attempts.close()


async def test_what_full_workers_give_back_again_and_again_does_not_wait_for_ever() -> None:
    queue, errors = OneTurn(), list[Exception]()
    attempts, (first,) = make(queue, errors, n=1)
    attempts.begin()
    for is_taken in (False, False, True):
        attempts.handed_back(first, "full")
        queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("d", "decode")))
        if is_taken:
            attempts.prefill_started(first, 0, 0.0)
    assert first.given_back_at is None, "a worker has taken it on"
    queue.longest_wait = 0.0
    attempts.handed_back(first, "full")
    queue.waiters[-1].go(Pair(worker("p", "prefill"), worker("d", "decode")))
    assert not errors, "it has waited for no time yet"
    attempts.handed_back(first, "full")
    assert [str(error) for error in errors] == ["waited"]
    attempts.close()
