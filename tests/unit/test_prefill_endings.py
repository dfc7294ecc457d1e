"""How a request ends in the prefill engine before it is done: forgotten, or its lease over."""

from __future__ import annotations

from typing import Any

import pytest

from prefill_worker.commands import Extend
from prefill_worker.events import PrefillDone
from tests.helpers.prefill_core import make_req

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("each_lookahead")]
PAGE = 4


@pytest.mark.parametrize("state", ["queued", "reserving", "computing", "committing"])
def test_a_request_is_forgotten_in_every_state_and_the_next_gets_its_place_CAN_01(drivers: Any, state: str) -> None:
    driver = drivers(num_pages=4, max_context=16, chunk_tokens=4)
    if state == "queued":
        holder = driver.admit(make_req([9], uid=1))
        key = driver.admit(make_req(range(16), uid=2))
        driver.forget(key)
        driver.forget(holder)
    else:
        key = driver.admit(make_req(range(16), uid=2))
        if state != "reserving":
            driver.compute_for_grpc(key, pages=4)
            driver.step()
        if state == "committing":
            driver.run()
        driver.forget(key)
    driver.forget(key)  # Unknown by now, and fine.
    driver.assert_idle()
    driver.prefill(range(100, 116), uid=3)


def test_what_was_computed_before_a_cancel_is_a_prefix_hit_later(drivers: Any) -> None:
    driver = drivers(chunk_tokens=6)
    key = driver.admit(make_req(range(20), uid=1))
    driver.compute(key)
    driver.step()
    driver.forget(key)
    assert driver.admitted[driver.admit(make_req(range(20), uid=2))].cached_tokens == PAGE


def test_no_chunk_starts_after_the_lease_and_pages_stay_until_forgotten(drivers: Any) -> None:
    driver = drivers(chunk_tokens=4)
    key = driver.admit(make_req(range(12), uid=1))
    driver.compute_for_grpc(key, pages=3, deadline=driver.clock + 1)
    driver.step()
    driver.clock += 1
    driver.step()
    assert "lease" in str(driver.broken(key).error)
    assert driver.runner.computed_tokens == 4 and not driver.core.has_work()
    assert len(driver.announced(key)) == 1 - driver.runner.lookahead  # What lands late is not sent.
    driver.forget(key)


def test_a_lease_that_ends_while_nothing_is_computed_breaks_the_request_by_the_clock(drivers: Any) -> None:
    driver = drivers()
    key = driver.admit(make_req(range(12), uid=1))
    driver.compute_for_grpc(key, pages=3, deadline=driver.clock + 1)
    driver.core.tick(driver.clock + 2)
    assert driver.broken(key) and not driver.core.has_work()


def test_a_page_completed_by_a_chunk_that_outlived_the_lease_is_not_sent(drivers: Any) -> None:
    def slow(batch: object) -> None:
        driver.clock += 5

    driver = drivers(before_run=slow)
    key = driver.admit(make_req(range(4), uid=1))
    driver.compute_for_grpc(key, pages=1, deadline=driver.clock + 1)
    driver.run()
    assert driver.announced(key) == [] and not driver.of(PrefillDone, key)
    assert driver.broken(key)


def test_a_renewed_lease_lets_the_request_go_on(drivers: Any) -> None:
    driver = drivers(chunk_tokens=4)
    key = driver.admit(make_req(range(12), uid=1))
    driver.compute_for_grpc(key, pages=3, deadline=driver.clock + 1)
    driver.do(Extend({key: driver.clock + 10, key._replace(uid=99): 0.0}))
    driver.clock += 5
    driver.run()
    assert driver.done(key).pages_sent == 3
