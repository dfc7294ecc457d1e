"""Every way in which a request can end in the decode core before its last token."""

from __future__ import annotations

import pytest

from common.errors import Aborted, Unavailable
from common.work_key import WorkKey
from decode_worker import commands, events
from tests.helpers.decode_core import EPOCH, PROMPT, Harness, make_req

pytestmark = pytest.mark.usefixtures("each_lookahead")


def test_can_04_requests_waiting_for_a_batch_slot_are_dropped_by_cancel() -> None:
    harness = Harness(max_running=1, pages=64)
    harness.admit(make_req(PROMPT, uid=1, output_len=20))
    waiting = [make_req([*PROMPT, uid], uid=uid) for uid in range(2, 12)]
    for req in waiting:
        harness.admit(req)
    harness.step()
    for req in waiting:
        harness.do(commands.Cancel(req.key))
    harness.run()
    assert len(harness.tokens(WorkKey(EPOCH, 1, 1))) == 20
    assert not any(harness.tokens(req.key) for req in waiting)
    harness.assert_idle()


def test_cancelling_a_running_request_ends_its_tokens_and_keeps_its_pages_as_cache() -> None:
    harness = Harness()
    req = make_req(PROMPT, output_len=20)
    harness.admit(req)
    harness.step()
    harness.do(commands.Cancel(req.key))
    harness.do(commands.Cancel(req.key))
    seen = len(harness.tokens(req.key))
    harness.run()
    assert len(harness.tokens(req.key)) == seen
    assert harness.counts().cached == 2
    harness.assert_idle()


def test_a_tombstone_refuses_a_later_reserve_for_one_lease() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    harness.do(commands.Cancel(req.key))
    with pytest.raises(Aborted, match="was cancelled"):
        harness.reserve(req)
    harness.reserve(make_req(PROMPT, attempt=2))
    harness.tick(11)
    harness.reserve(req)


def test_a_ticket_ends_with_the_last_of_its_completions() -> None:
    harness = Harness()
    req = make_req(PROMPT, n=2)
    granted = harness.granted(harness.reserve(req))
    harness.do(commands.Cancel(req.key))
    assert harness.do(commands.Renew((granted.ticket,))) == []
    harness.do(commands.Cancel(req.key.for_completion(1)))
    assert harness.do(commands.Renew((granted.ticket,))) == [granted.ticket]


def test_hnd_07_an_unrenewed_lease_ends_on_the_clock_alone_and_the_router_is_told() -> None:
    harness = Harness()
    req = make_req(PROMPT, n=2)
    granted = harness.granted(harness.reserve(req))
    harness.tick(9)
    assert harness.do(commands.Renew((granted.ticket, "unknown"))) == ["unknown"]
    harness.tick(9)
    assert not harness.told(events.Failed)
    harness.tick(2)
    failures = [event.failure for event in harness.told(events.Failed)]
    assert [failure.key.uid for failure in failures] == [1, 2]
    assert all(failure.retryable and "lease" in failure.message for failure in failures)
    with pytest.raises(Aborted, match="lease"):
        harness.commit(req, granted)


def test_a_session_that_breaks_drops_all_its_work_and_only_that() -> None:
    harness = Harness(pages=16)
    harness.do(commands.SessionOpened(8))
    running, receiving = make_req(PROMPT, uid=1, output_len=20), make_req([*PROMPT, 2], uid=2)
    other = make_req([*PROMPT, 3], uid=3, epoch=8, output_len=9)
    harness.admit(running)
    harness.admit(other)
    granted = harness.granted(harness.reserve(receiving))
    in_line = harness.reserve(make_req(range(100, 140), uid=4))
    harness.step()
    harness.do(commands.SessionClosed(EPOCH))
    reply = harness.reply(in_line)
    assert reply is not None and isinstance(reply.error, Aborted)
    seen = len(harness.tokens(running.key))
    harness.do(commands.Release(granted.ticket, drained=True))
    harness.run()
    assert len(harness.tokens(running.key)) == seen
    assert len(harness.tokens(other.key)) == 9
    with pytest.raises(Unavailable, match="no session"):
        harness.reserve(make_req(PROMPT, uid=5))
    harness.assert_idle()


def test_drain_turns_the_line_away_and_answers_when_the_last_request_is_done() -> None:
    harness = Harness(pages=8)
    running, receiving = make_req(PROMPT, uid=1, output_len=6), make_req(range(50, 58), uid=2)
    harness.admit(running)
    granted = harness.granted(harness.reserve(receiving))
    in_line = harness.reserve(make_req(range(100, 120), uid=3))
    harness.core.handle(commands.Drain(), 1000)
    reply = harness.reply(in_line)
    assert reply is not None and isinstance(reply.error, Unavailable)
    with pytest.raises(Unavailable, match="draining"):
        harness.reserve(make_req(PROMPT, uid=4))
    harness.run()
    assert harness.reply(1000) is None
    harness.commit(receiving, granted)
    harness.run()
    assert harness.reply(1000) is not None
    assert len(harness.tokens(receiving.key)) == 4


def test_handing_back_retracts_what_runs_and_fails_what_is_being_received() -> None:
    harness = Harness()
    harness.admit(make_req(PROMPT, uid=1, output_len=20))
    granted = harness.granted(harness.reserve(make_req([*PROMPT, 2], uid=2)))
    harness.step()
    harness.new_events()
    harness.do(commands.HandBack())
    fresh = harness.new_events()
    assert [event.key.uid for event in fresh if isinstance(event, events.Retracted)] == [1]
    assert [event.failure.key.uid for event in fresh if isinstance(event, events.Failed)] == [2]
    harness.do(commands.Release(granted.ticket, drained=True))
    harness.run()
    assert harness.tokens(WorkKey(EPOCH, 1, 1))[2:] == []
    harness.assert_idle()
