"""Which requests the prefill engine gives pages, and when."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import AlreadyExists, OutOfRange
from prefill_worker.commands import Admit
from tests.helpers.prefill_core import make_req

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("each_lookahead")]


def test_admission_waits_for_pages_in_order_of_priority_then_arrival(drivers: Any) -> None:
    driver = drivers(num_pages=4, max_context=16)
    first = driver.admit(make_req(range(16), uid=1, output_len=1))
    late = driver.admit(make_req(range(100, 116), uid=3, output_len=1))
    early = driver.admit(make_req(range(50, 66), uid=2, output_len=1))
    urgent = driver.admit(make_req(range(150, 166), uid=4, output_len=1, priority=1))
    order = []
    for _ in range(4):
        (key,) = [key for key in driver.admitted if key not in order]
        order.append(key)
        driver.compute(key)
        driver.run()
        driver.forget(key)
    assert order == [first, urgent, early, late]


def test_a_small_prompt_does_not_overtake_a_large_one_that_waits_for_pages(drivers: Any) -> None:
    driver = drivers(num_pages=4, max_context=16)
    holder = driver.admit(make_req(range(8), uid=1))
    large = driver.admit(make_req(range(20, 36), uid=2))
    small = driver.admit(make_req(range(50, 53), uid=3))
    assert set(driver.admitted) == {holder}
    driver.forget(holder)
    assert set(driver.admitted) == {holder, large}
    driver.forget(large)
    assert small in driver.admitted


def test_at_most_max_running_requests_hold_pages(drivers: Any) -> None:
    driver = drivers(max_running=2)
    keys = [driver.admit(make_req([uid], uid=uid)) for uid in (1, 2, 3)]
    assert set(driver.admitted) == set(keys[:2])
    driver.forget(keys[0])
    assert set(driver.admitted) == set(keys)


def test_a_prompt_that_can_never_fit_the_pool_is_refused_naming_pages_and_limit_HND_01(drivers: Any) -> None:
    driver = drivers(num_pages=3, max_context=64)
    with pytest.raises(OutOfRange, match=r"3 pages of 4 tokens.*13 tokens = 4 pages"):
        driver.core.handle(Admit(make_req(range(13))), 0)
    driver.prefill(range(12), uid=2)


def test_a_prompt_beyond_the_context_is_refused_naming_the_limit_BND_01(drivers: Any) -> None:
    driver = drivers(num_pages=32, max_context=10)
    with pytest.raises(OutOfRange, match="at most 10 tokens.*11"):
        driver.core.handle(Admit(make_req(range(11))), 0)
    driver.prefill(range(10), uid=2)


def test_a_key_that_is_here_is_refused(drivers: Any) -> None:
    driver = drivers()
    driver.admit(make_req([1], uid=1))
    with pytest.raises(AlreadyExists):
        driver.core.handle(Admit(make_req([1], uid=1)), 9)


def test_an_abandoned_admission_is_taken_back_also_after_its_reply(drivers: Any) -> None:
    driver = drivers(max_running=1)
    first, second = driver.admit(make_req([1], uid=1)), driver.admit(make_req([2], uid=2))
    driver.abandon(second)
    driver.abandon(first)
    driver.assert_idle()
