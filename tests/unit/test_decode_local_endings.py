"""Every way in which a prompt that a decode worker computes itself can end before its output does."""

from __future__ import annotations

import pytest

from decode_worker import commands, events
from tests.helpers.decode_core import EPOCH, PROMPT, colocated, fill, first_tokens, make_req
from tests.helpers.fake_runner import continuation

pytestmark = pytest.mark.usefixtures("each_lookahead")


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 9])
def test_a_cancel_in_every_state_is_silent_and_gives_everything_back(steps: int) -> None:
    harness = colocated()
    key = harness.prefill(make_req(PROMPT, output_len=20))
    for _ in range(steps):
        harness.step()
    harness.do(commands.Cancel(key))
    seen = len(harness.events)
    harness.run()
    assert not [event for event in harness.events[seen:] if not isinstance(event, events.Stats)]
    harness.assert_idle()
    again = harness.prefill(make_req(PROMPT, uid=2, output_len=3))
    harness.run()
    assert harness.ids(again) == continuation(PROMPT, 3)


def test_a_cancel_in_line_and_one_before_the_prompt_comes_leave_nothing() -> None:
    harness = colocated(max_running=1)
    harness.prefill(make_req(PROMPT, uid=1, output_len=4))
    waiting = harness.prefill(make_req(PROMPT, uid=2, output_len=4))
    harness.do(commands.Cancel(waiting))
    harness.do(commands.Cancel(make_req(PROMPT, uid=3).key))
    early = harness.prefill(make_req(PROMPT, uid=3, output_len=4))
    harness.run()
    assert not harness.tokens(waiting) and not harness.tokens(early) and not harness.told(events.Failed)
    harness.assert_idle()


def test_one_of_n_cancelled_while_the_prompt_is_computed_is_not_run() -> None:
    harness = colocated()
    key = harness.prefill(make_req(PROMPT, n=3, output_len=4))
    harness.step()
    harness.do(commands.Cancel(key.for_completion(1)))
    harness.run()
    assert [bool(harness.tokens(key.for_completion(i))) for i in range(3)] == [True, False, True]
    harness.assert_idle()


def test_the_same_submission_again_is_ignored() -> None:
    harness = colocated()
    key = harness.prefill(make_req(PROMPT, output_len=4))
    harness.prefill(make_req(PROMPT, output_len=4))
    harness.step_and_land()
    harness.prefill(make_req(PROMPT, output_len=4))
    harness.run()
    assert harness.ids(key) == continuation(PROMPT, 4)
    harness.assert_idle()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_deadline_that_passes_before_the_first_token_fails_the_request_for_good(steps: int) -> None:
    harness = colocated(max_running=1, chunk_tokens=2)
    req = make_req(PROMPT, n=2, output_len=4)
    harness.prefill(req, deadline=harness.now + 5)
    for _ in range(steps):
        harness.step()
    harness.tick(6)
    failures = [event.failure for event in harness.told(events.Failed)]
    assert [(failure.key.uid, failure.retryable) for failure in failures] == [(1, False), (2, False)]
    assert all("deadline" in failure.message for failure in failures)
    harness.run()
    harness.assert_idle()


def test_no_deadline_matters_once_the_first_token_is_there() -> None:
    harness = colocated(chunk_tokens=100)
    key = harness.prefill(make_req(PROMPT, output_len=9), deadline=harness.now + 5)
    harness.step_and_land()
    harness.tick(6)
    harness.run()
    assert harness.ids(key) == continuation(PROMPT, 9)


def test_a_session_that_closes_takes_its_prompts_with_it() -> None:
    harness = colocated(max_running=1)
    for uid in (1, 2):
        harness.prefill(make_req([*PROMPT, uid], uid=uid, output_len=4))
    harness.step()
    harness.do(commands.SessionClosed(EPOCH))
    harness.prefill(make_req(PROMPT, uid=3, output_len=4))
    harness.run()
    assert not harness.told(events.StepTokens) and not harness.told(events.Failed)
    harness.assert_idle()


def test_drain_hands_back_the_line_without_a_failure_and_lets_what_was_begun_finish() -> None:
    harness = colocated(max_running=1)
    begun, waiting = (harness.prefill(make_req([*PROMPT, uid], uid=uid, output_len=4)) for uid in (1, 2))
    harness.step()
    harness.core.handle(commands.Drain(), 1000)
    assert harness.told(events.Retracted) == [events.Retracted(waiting)]
    harness.prefill(make_req(PROMPT, uid=3, output_len=4))
    (failed,) = harness.told(events.Failed)
    assert failed.failure.retryable and "draining" in failed.failure.message
    harness.run()
    assert harness.reply(1000) is not None and len(harness.tokens(begun)) == 4
    harness.assert_idle()


def test_handing_back_retracts_prompts_under_way_too() -> None:
    harness = colocated()
    keys = [harness.prefill(make_req([*PROMPT, uid], uid=uid, output_len=9)) for uid in (1, 2)]
    harness.step()
    harness.core.handle(commands.Drain(), 1000)
    harness.do(commands.HandBack())
    assert {event.key for event in harness.told(events.Retracted)} == set(keys)
    harness.run()
    assert harness.reply(1000) is not None
    harness.assert_idle()


def test_everything_of_a_session_ends_silently_whatever_is_in_the_air() -> None:
    harness = colocated(chunk_tokens=100)
    for uid in (1, 2, 3):
        harness.prefill(make_req([*PROMPT, uid], uid=uid, output_len=9))
    harness.step()
    harness.new_events()
    harness.do(commands.SessionClosed(EPOCH))
    harness.run()
    assert not [event for event in harness.new_events() if not isinstance(event, events.Stats)]
    harness.assert_idle()


def test_pages_of_a_prompt_whose_chunk_is_in_the_air_stay_its_own_until_it_lands() -> None:
    harness = colocated(pages=4, chunk_tokens=100)
    key = harness.prefill(make_req(range(30, 40), uid=1, output_len=6))
    harness.step()
    in_air = harness.runner.lookahead
    harness.do(commands.Cancel(key))
    taker = make_req(range(60, 70), uid=2, output_len=6)
    call = harness.reserve(taker)
    assert (harness.reply(call) is None) == bool(in_air)
    if in_air:
        harness.step()
    granted = harness.granted(call)
    fill(harness.runner.pool, taker, granted.page_ids, granted.prefix_len)
    harness.run()
    harness.do(commands.Commit(granted.ticket, first_tokens(taker), len(granted.page_ids)))
    harness.run()
    assert harness.ids(taker.key) == continuation(range(60, 70), 6)
    harness.assert_idle()
