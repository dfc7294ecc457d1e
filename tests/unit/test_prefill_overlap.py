"""A chunk in the air while the next one is launched: pages go out when they have landed, and Forget waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefill_worker.events import PrefillDone
from tests.helpers.fake_runner import next_token
from tests.helpers.prefill_core import CoreDriver, make_req

PAGE = 4


@pytest.fixture
def driver() -> Iterator[CoreDriver]:
    driver = CoreDriver(page_size=PAGE, num_pages=8, max_context=32, chunk_tokens=PAGE, lookahead=1)
    yield driver
    for key in list(driver.core._jobs):
        driver.forget(key)
    driver.assert_idle()


def test_the_next_chunk_is_launched_before_the_last_one_lands(driver: CoreDriver) -> None:
    key = driver.admit(make_req(range(3 * PAGE), uid=1))
    driver.compute_for_grpc(key, pages=3)
    seen = []
    while driver.core.has_work():
        driver.step()
        seen.append((len(driver.runner.batches), len(driver.announced(key)), len(driver.of(PrefillDone, key))))
    assert seen == [(1, 0, 0), (2, 1, 0), (3, 2, 0), (3, 3, 1)]


def test_a_prompt_whose_last_chunk_is_in_the_air_is_not_computed_again(driver: CoreDriver) -> None:
    first = driver.admit(make_req(range(PAGE), uid=1))
    second = driver.admit(make_req(range(50, 50 + 2 * PAGE), uid=2))
    for key in (first, second):
        driver.compute(key)
    driver.run()
    assert sum(tokens for batch in driver.runner.batches for _, tokens in batch) == 3 * PAGE
    assert driver.done(first).tokens[0].token_id == next_token(list(range(PAGE)))


def test_forget_answers_only_after_the_chunk_in_the_air_has_landed(driver: CoreDriver) -> None:
    key = driver.admit(make_req(range(3 * PAGE), uid=1))
    driver.compute_for_grpc(key, pages=3)
    driver.step()
    driver.step()
    assert driver.core.has_work()
    driver.forget(key)
    assert not driver.core.has_work() and not driver.of(PrefillDone, key)
    assert len(driver.announced(key)) == 1  # What landed for nobody was not sent.
    driver.assert_idle()
    again = driver.admit(make_req(range(3 * PAGE), uid=2))
    assert driver.admitted[again].cached_tokens == 2 * PAGE  # But what it computed is kept.
    driver.compute(again)
    driver.run()
    assert driver.done(again).tokens[0].token_id == next_token(list(range(3 * PAGE)))


def test_what_lands_with_a_forgotten_job_is_not_lost_for_the_others(driver: CoreDriver) -> None:
    gone, stays = driver.admit(make_req([1, 2], uid=1)), driver.admit(make_req([5, 6], uid=2))
    driver.compute(gone)
    driver.compute_for_grpc(stays, pages=1)
    driver.step()
    driver.forget(gone)
    assert driver.done(stays).tokens[0].token_id == next_token([5, 6])
    assert [index for index, _ in driver.announced(stays)] == [0]


def test_a_lease_that_ends_while_the_last_chunk_is_in_the_air_breaks_the_request_once(driver: CoreDriver) -> None:
    key = driver.admit(make_req(range(PAGE), uid=1))
    driver.compute_for_grpc(key, pages=1, deadline=driver.clock + 1)
    driver.step()
    driver.core.tick(driver.clock + 2)
    driver.run()
    assert driver.broken(key) and driver.announced(key) == [] and not driver.of(PrefillDone, key)
