"""Recent facts are forgotten in time."""

from __future__ import annotations

import pytest

from common.recent import Recent

pytestmark = pytest.mark.unit


def test_a_fact_is_kept_for_its_time_counted_from_the_last_put() -> None:
    recent: Recent[str, int] = Recent(10.0)
    recent.put("a", 1, now=0.0)
    recent.put("b", 2, now=4.0)
    recent.put("a", 3, now=5.0)
    recent.forget_old(14.0)
    assert ("b" in recent, recent.get("a")) == (False, 3)
    recent.forget_old(15.0)
    assert len(recent) == 0


def test_memory_is_bounded_and_the_oldest_fact_goes_first() -> None:
    recent: Recent[int, None] = Recent(10.0, max_size=3)
    for i in range(5):
        recent.put(i, None, now=float(i))
    assert [i for i in range(5) if i in recent] == [2, 3, 4]
