"""The prefill engine's state machine, driven by hand."""

from __future__ import annotations

from typing import Any

import pytest

from common.core import SamplingParams
from common.work import FinishReason
from prefill_worker.commands import FlushPrefixCache
from prefill_worker.events import PrefillDone, Stats
from tests.helpers.fake_runner import EOS, next_token
from tests.helpers.prefill_core import CoreDriver, make_req

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("each_lookahead")]
PAGE = 4


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 7, 8, 9, 8 + PAGE])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 100])
def test_the_first_token_is_the_same_whatever_the_chunks_BND_05(drivers: Any, length: int, chunk_tokens: int) -> None:
    driver = drivers(chunk_tokens=chunk_tokens)
    ids = list(range(1, length + 1))
    for uid in (1, 2):  # Cold, then with a prefix hit.
        key = driver.admit(make_req(ids, uid=uid, output_len=1))
        driver.compute(key)
        driver.run()
        (token,) = driver.done(key).tokens
        assert (token.token_id, token.index, token.finish) == (next_token(ids), 0, FinishReason.LENGTH)
        driver.forget(key)


def test_a_full_prefix_hit_computes_the_last_token_and_still_ends_HND_04(drivers: Any) -> None:
    driver = drivers()
    ids = list(range(2 * PAGE))
    driver.prefill(ids, uid=1)
    computed = driver.runner.computed_tokens
    key = driver.admit(make_req(ids, uid=2))
    assert driver.admitted[key].cached_tokens == PAGE
    driver.compute_for_grpc(key, pages=2)
    driver.run()
    assert driver.runner.computed_tokens - computed == PAGE
    assert driver.started(key).cached_tokens == PAGE
    assert driver.done(key).pages_sent == 2
    assert [index for index, _ in driver.announced(key)] == [0, 1]


def test_cached_pages_that_the_decode_worker_lacks_are_sent_before_anything_is_computed(drivers: Any) -> None:
    seen: list[int] = []
    ids = list(range(4 * PAGE + 1))
    key = make_req(ids, uid=2).key
    driver: CoreDriver = drivers(before_run=lambda batch: seen.append(len(driver.announced(key))))
    driver.prefill(ids, uid=1)
    driver.admit(make_req(ids, uid=2))
    seen.clear()
    driver.compute_for_grpc(key, pages=5)
    driver.run()
    assert seen == [4]
    assert [index for index, _ in driver.announced(key)] == [0, 1, 2, 3, 4]


def test_pages_the_decode_worker_holds_are_never_sent(drivers: Any) -> None:
    driver = drivers()
    key = driver.admit(make_req(range(3 * PAGE), uid=1))
    pages = list(driver.core._jobs[key].pages)
    driver.compute_for_grpc(key, pages=1, prefix_len=2 * PAGE)
    driver.run()
    assert driver.announced(key) == [(0, pages[2])]
    assert driver.done(key).pages_sent == 1


def test_a_decode_worker_that_holds_the_whole_prompt_is_sent_nothing_HND_04(drivers: Any) -> None:
    driver = drivers()
    key = driver.admit(make_req(range(2 * PAGE), uid=1))
    driver.compute_for_grpc(key, pages=0, prefix_len=2 * PAGE)
    driver.run()
    assert driver.announced(key) == [] and driver.done(key).pages_sent == 0


def test_each_page_is_announced_once_it_is_complete_and_the_partial_one_at_the_end(drivers: Any) -> None:
    driver = drivers(chunk_tokens=6)
    key = driver.admit(make_req(range(15), uid=1))
    driver.compute_for_grpc(key, pages=4)
    seen = []
    while driver.core.has_work():
        driver.step()
        seen.append(len(driver.announced(key)))
    assert seen == [*[0] * driver.runner.lookahead, 1, 3, 4]


def test_a_short_prompt_does_not_wait_behind_a_long_one(drivers: Any) -> None:
    driver = drivers(chunk_tokens=8, num_pages=64, max_context=256)
    long = driver.admit(make_req(range(100), uid=1, output_len=1))
    driver.compute(long)
    driver.step()
    short = driver.admit(make_req(range(6), uid=2, output_len=1))
    driver.compute(short)
    for _ in range(1 + driver.runner.lookahead):
        driver.step()
    assert driver.of(PrefillDone, short) and not driver.of(PrefillDone, long)
    driver.run()
    assert driver.of(PrefillDone, long)


def test_no_step_computes_more_tokens_than_the_budget(drivers: Any) -> None:
    driver = drivers(chunk_tokens=8)
    for uid in (1, 2, 3):
        driver.compute(driver.admit(make_req(range(uid * 7), uid=uid, output_len=1)))
    driver.run()
    assert all(sum(tokens for _, tokens in batch) <= 8 for batch in driver.runner.batches)
    assert sum(tokens for batch in driver.runner.batches for _, tokens in batch) == 7 + 14 + 21


def test_n_completions_get_a_first_token_each_from_one_prefill(drivers: Any) -> None:
    driver = drivers()
    ids = list(range(10))
    key = driver.admit(make_req(ids, uid=5, n=3))
    driver.compute_for_grpc(key, pages=3)
    driver.run()
    tokens = driver.done(key).tokens
    assert [token.key.uid for token in tokens] == [5, 6, 7]
    assert [token.token_id for token in tokens] == [next_token(ids, i) for i in range(3)]
    assert [token.finish for token in tokens] == [None] * 3
    assert driver.runner.computed_tokens == 10


def test_only_the_completions_whose_first_token_ends_them_are_finished(drivers: Any) -> None:
    driver = drivers(next_token=lambda history, completion: EOS if completion == 1 else 5)
    key = driver.admit(make_req(range(3), uid=1, n=3))
    driver.compute(key)
    driver.run()
    assert [token.finish for token in driver.done(key).tokens] == [None, FinishReason.STOP, None]


def test_min_tokens_and_ignore_eos_hold_for_the_first_token_too_HND_13(drivers: Any) -> None:
    driver = drivers(next_token=lambda history, completion: EOS)
    for uid, params, finish in (
        (1, SamplingParams(), FinishReason.STOP),
        (2, SamplingParams(ignore_eos=True), None),
        (3, SamplingParams(min_tokens=2), None),
        (4, SamplingParams(ignore_eos=True, stop_token_ids=(EOS,)), FinishReason.STOP),
    ):
        key = driver.admit(make_req([1, 2], uid=uid, sampling_params=params))
        driver.compute(key)
        driver.run()
        assert [token.finish for token in driver.done(key).tokens] == [finish]
        driver.forget(key)


def test_a_continuation_counts_its_index_from_the_clients_prompt(drivers: Any) -> None:
    driver = drivers()
    ids = list(range(9))
    key = driver.admit(make_req(ids, uid=1, prompt_len=6, attempt=2, output_len=5))
    driver.compute(key)
    driver.run()
    (token,) = driver.done(key).tokens
    assert (token.index, token.token_id, token.key.attempt) == (3, next_token(ids), 2)


def test_flushing_drops_what_nobody_uses(drivers: Any) -> None:
    driver = drivers()
    driver.prefill(range(8), uid=1)
    held = driver.admit(make_req([*range(4), 77], uid=2))
    assert driver.do(FlushPrefixCache()) == 1
    driver.forget(held)
    assert driver.do(FlushPrefixCache()) == 1


def test_stats_are_told_when_they_change_and_only_then(drivers: Any) -> None:
    driver = drivers(chunk_tokens=4)
    driver.core.tick(0.0)
    driver.core.tick(0.1)
    key = driver.admit(make_req(range(10), uid=1))
    driver.core.tick(0.2)
    driver.compute(key)
    driver.step()
    driver.core.tick(0.3)
    driver.forget(key)
    driver.core.tick(0.4)
    stats = [event for event in driver.events if isinstance(event, Stats)]
    assert [(s.running, s.waiting, s.queued_tokens) for s in stats] == [(0, 0, 0), (0, 1, 10), (1, 0, 6), (0, 0, 0)]
    assert [(s.pages.held, s.pages.cached) for s in stats] == [(0, 0), (3, 0), (3, 0), (0, 1)]


def test_an_unknown_request_is_not_computed(drivers: Any) -> None:
    driver = drivers()
    driver.compute(make_req([1]).key)
    assert not driver.core.has_work()
