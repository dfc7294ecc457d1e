"""When a request would have its turn, and who is told early that it would come too late."""

from __future__ import annotations

from datetime import timedelta

import pytest

from router.forecast import Forecast

pytestmark = pytest.mark.unit


def test_the_wait_is_what_is_ahead_at_the_lines_pace_and_the_prompt_at_a_workers() -> None:
    assert Forecast(3000, 500, line_pace=1000, worker_pace=250).seconds == 5.0
    assert Forecast(3000, 500, line_pace=1000, worker_pace=None).seconds == 3.0
    assert Forecast(3000, 500, line_pace=None, worker_pace=250).seconds is None


@pytest.mark.parametrize("time_left", [None, 10.0, 3.0, 0.5])
def test_who_has_time_or_says_no_deadline_or_will_know_soon_anyway_is_not_refused(time_left: float | None) -> None:
    assert Forecast(3000, 0, line_pace=1000, worker_pace=None).why_too_late(time_left) is None


def test_who_would_be_served_too_late_is_told_why_and_when_to_try_again() -> None:
    error = Forecast(30_000, 0, line_pace=1000, worker_pace=None).why_too_late(2.0)
    assert error is not None and error.retry_after == timedelta(seconds=30)
    assert str(error) == (
        "its deadline is in 2.0 s and its first token is expected in 30.0 s: "
        "30000 prompt tokens are before it, which take 1000 a second"
    )


def test_without_a_measured_pace_nobody_is_refused_and_the_hint_is_a_second() -> None:
    unknown = Forecast(10**9, 10**6, line_pace=None, worker_pace=None)
    assert unknown.why_too_late(1.5) is None and unknown.retry_after == timedelta(seconds=1)


def test_the_hint_has_bounds() -> None:
    assert Forecast(10**9, 0, line_pace=1, worker_pace=None).retry_after == timedelta(seconds=60)
    assert Forecast(10, 0, line_pace=1000, worker_pace=None).retry_after == timedelta(seconds=1)
