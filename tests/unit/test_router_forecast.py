"""When a request would have its answer, and who is told early that it would come too late."""

from __future__ import annotations

from datetime import timedelta

import pytest

from common.errors import DeadlineExceeded, ResourceExhausted
from router.queueing.answers import Answer, Answers
from router.queueing.forecast import Forecast

pytestmark = pytest.mark.unit


def forecast(wait: float | None, service: float = 0.0) -> Forecast:
    return Forecast(prompts_ahead=7, tokens_ahead=3000, wait=wait, service=service)


@pytest.mark.parametrize("time_left", [None, 10.0, 5.0, 0.5])
def test_who_has_time_or_says_no_deadline_or_will_know_soon_anyway_is_not_refused(time_left: float | None) -> None:
    assert forecast(3.0, 1.0).why_not_wait(time_left) is None


def test_just_in_time_is_too_late() -> None:
    assert isinstance(forecast(3.0, 1.0).why_not_wait(4.9), ResourceExhausted)


def test_who_would_be_served_too_late_is_told_why_and_when_to_try_again() -> None:
    error = forecast(30.0, 2.0).why_not_wait(20.0)
    assert error is not None and error.retry_after == timedelta(seconds=30)
    assert str(error) == (
        "its deadline is in 20.0 s and must be at least 40.0 s away: its answer is expected in 32.0 s, 30.0 s of them for the "
        "7 prompts of 3000 tokens before it"
    )


def test_whose_turn_comes_too_late_for_its_answer_does_not_take_the_time_of_others() -> None:
    made = forecast(0.5, 3.0)
    assert made.why_not_go(None) is None and made.why_not_go(3.0) is None
    late, passed = made.why_not_go(2.9), made.why_not_go(0.9)
    assert isinstance(late, ResourceExhausted) and late.retry_after == timedelta(seconds=1)
    assert isinstance(passed, DeadlineExceeded) and "its answer takes 3.0 s" in str(passed)


def test_without_a_measured_pace_nobody_is_refused_and_the_hint_is_a_second() -> None:
    unknown = forecast(None, 10.0**6)
    assert unknown.why_not_wait(1.5) is None and unknown.retry_after == timedelta(seconds=1)


def test_the_hint_has_bounds() -> None:
    assert forecast(1e9).retry_after == timedelta(seconds=60)
    assert forecast(0.01).retry_after == timedelta(seconds=1)


def test_answers_are_expected_to_be_like_the_last_ones_and_never_longer_than_asked() -> None:
    answers = Answers()
    assert answers.expected_seconds(100) == 0
    for _ in range(3):
        answers.note(Answer(tokens=11, handoff_seconds=0.0, place_seconds=0.5, rest_seconds=4.5))
    assert answers.expected_seconds(100) == pytest.approx(5.0)
    assert answers.expected_seconds(5) == pytest.approx(2.0)
    assert answers.expected_seconds(1) == 0
    for _ in range(200):
        answers.note(Answer(tokens=1, handoff_seconds=0.0, place_seconds=0.0, rest_seconds=0.0))
    assert answers.expected_seconds(100) == pytest.approx(0, abs=0.01)


def test_answers_of_one_token_say_nothing_of_the_time_between_tokens() -> None:
    answers = Answers()
    for _ in range(30):
        answers.note(Answer(tokens=1, handoff_seconds=0.0, place_seconds=0.0, rest_seconds=0.0))
    for _ in range(200):
        answers.note(Answer(tokens=11, handoff_seconds=0.0, place_seconds=0.5, rest_seconds=4.5))
    few = Answers()
    few.note(Answer(tokens=1, handoff_seconds=0.0, place_seconds=0.0, rest_seconds=0.0))
    few.note(Answer(tokens=11, handoff_seconds=0.0, place_seconds=0.5, rest_seconds=4.5))
    assert few.expected_seconds(6) == pytest.approx(5 * 0.5), "6 tokens on average, half a second apart"
    assert answers.expected_seconds(100) == pytest.approx(5.0, rel=0.01)


def test_a_hand_off_that_stalled_says_little_of_the_next_answers() -> None:
    answers = Answers()
    for _ in range(20):
        answers.note(Answer(tokens=5, handoff_seconds=0.1, place_seconds=0.1, rest_seconds=0.3))
    assert answers.expected_seconds(100) == pytest.approx(0.5)
    for _ in range(5):
        answers.note(Answer(tokens=5, handoff_seconds=30.0, place_seconds=0.1, rest_seconds=0.3))
    assert answers.expected_seconds(5) < 0.75 and answers.expected_seconds(100) < 0.75
    assert answers.expected_seconds(1) == 0, "its only token is its first"


def test_the_wait_for_a_place_in_the_batch_is_one_and_not_one_for_each_token() -> None:
    answers = Answers()
    answers.note(Answer(tokens=2, handoff_seconds=0.0, place_seconds=10.0, rest_seconds=0.0))
    answers.note(Answer(tokens=202, handoff_seconds=0.0, place_seconds=10.0, rest_seconds=4.0))
    assert answers.expected_seconds(2) == pytest.approx(10.0)
    assert answers.expected_seconds(102) == pytest.approx(12.0)
