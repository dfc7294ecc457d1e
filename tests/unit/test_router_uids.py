"""The order of arrival, at one router and at several."""

from __future__ import annotations

import pytest

from router.uids import Uids

pytestmark = pytest.mark.unit


def test_a_new_router_s_requests_do_not_go_before_those_an_old_one_took_earlier() -> None:
    now = 1_000.0
    old, new = Uids(clock=lambda: now), Uids(clock=lambda: now)
    for _ in range(100):
        now += 1.0
        (earlier,) = old.take(1)
    now += 1.0
    (later,) = new.take(1)
    now += 1.0
    (latest,) = old.take(1)
    assert earlier < later < latest


def test_uids_of_one_request_are_consecutive_and_rise_whatever_the_clock_does() -> None:
    now = 5.0
    uids = Uids(clock=lambda: now)
    first = uids.take(16)
    now = 4.0
    second = uids.take(2)
    assert list(first) == list(range(first.start, first.start + 16))
    assert second.start == first.stop
