"""A step in the air while the one before is read: who has ended says nothing more, and nothing is reused before it lands."""

from __future__ import annotations

from typing import Any

import pytest

from common.core import Req, SamplingParams
from common.work import FinishReason
from common.work_key import WorkKey
from decode_worker import commands, events
from tests.helpers.decode_core import EPOCH, PROMPT, Harness, fill, first_tokens, make_req
from tests.helpers.fake_runner import continuation


def ahead(**shape: Any) -> Harness:
    return Harness(lookahead=1, **shape)


def stopping(ids: list[int], after: int, *, output_len: int = 6, uid: int = 1) -> Req:
    """A request whose output is ended by a stop token, its output number `after` (from 1)."""
    stop = continuation(ids, after)[-1]
    sampling = SamplingParams(max_tokens=output_len, seed=1, stop_token_ids=(stop,))
    return make_req(ids, uid=uid, output_len=output_len, sampling=sampling)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read() -> None:
    harness = ahead()
    req = make_req(PROMPT, output_len=5)
    harness.admit(req)
    seen = []
    while harness.core.has_work():
        harness.step()
        seen.append((len(harness.runner.batches), len(harness.tokens(req.key))))
    assert seen == [(1, 0), (2, 2), (3, 3), (4, 4), (4, 5)]


def test_a_request_found_finished_one_step_late_says_nothing_more() -> None:
    harness = ahead()
    req = stopping(PROMPT, 4)
    harness.admit(req)
    harness.run()
    tokens = harness.tokens(req.key)
    assert [token.token_id for token in tokens] == continuation(PROMPT, 4)
    assert [token.finish for token in tokens] == [None, None, None, FinishReason.STOP]
    assert len(harness.runner.batches) == 4  # Three steps for three tokens, and the one that was too many.
    harness.assert_idle()


def test_pages_and_row_of_a_finished_request_are_not_reused_before_its_last_step_has_landed() -> None:
    harness = ahead(pages=4, max_running=1)
    req = stopping(PROMPT, 3)
    harness.admit(req)
    harness.step()
    harness.step()
    harness.step()  # The third step is in the air when the second one's token ends the request.
    assert harness.tokens(req.key)[-1].finish is FinishReason.STOP
    waiting = harness.reserve(make_req(range(50, 58), uid=2, output_len=8))
    assert harness.reply(waiting) is None and harness.runner.page_table.num_free == 0
    assert harness.counts().held == 4
    harness.step()
    harness.commit(make_req(range(50, 58), uid=2, output_len=8), harness.granted(waiting))
    harness.run()
    assert [token.token_id for token in harness.tokens(WorkKey(EPOCH, 2, 1))] == continuation(range(50, 58), 8)
    harness.assert_idle()


def test_what_a_dropped_step_computed_is_cached_as_far_as_its_tokens_are_known() -> None:
    harness = ahead()
    ids = PROMPT[:6]
    harness.admit(stopping(ids, 2))  # 8 known tokens in the end, the KV of the last one by the step that was too many.
    harness.run()
    whole = [*ids, *continuation(ids, 2)]
    granted = harness.granted(harness.reserve(make_req([*whole, 1], uid=2)))
    assert granted.prefix_len == 8
    harness.commit(make_req([*whole, 1], uid=2), granted)
    harness.run()
    assert [token.token_id for token in harness.tokens(WorkKey(EPOCH, 2, 1))] == continuation([*whole, 1], 4)
    harness.assert_idle()


@pytest.mark.parametrize("output_len", [2, 3, 4])
def test_a_request_whose_last_token_is_in_the_air_is_not_launched(output_len: int) -> None:
    harness = ahead()
    long, short = make_req(PROMPT, uid=1, output_len=8), make_req([*PROMPT, 1], uid=2, output_len=output_len)
    harness.admit(long)
    harness.admit(short)
    harness.run()
    assert sum(uid == 2 for batch in harness.runner.batches for uid, _ in batch) == output_len - 1
    assert [token.finish for token in harness.tokens(short.key)] == [None] * (output_len - 1) + [FinishReason.LENGTH]
    assert [token.token_id for token in harness.tokens(short.key)] == continuation([*PROMPT, 1], output_len)
    harness.assert_idle()


def test_min_tokens_counts_tokens_that_were_read_not_launched() -> None:
    harness = ahead()
    stops = tuple(continuation(PROMPT, 40))
    sampling = SamplingParams(max_tokens=40, seed=1, stop_token_ids=stops, min_tokens=5)
    req = make_req(PROMPT, output_len=40, sampling=sampling)
    harness.admit(req)
    harness.run()
    tokens = harness.tokens(req.key)
    assert [token.index for token in tokens] == [0, 1, 2, 3, 4]
    assert tokens[-1].finish is FinishReason.STOP


def test_a_cancel_with_a_step_in_the_air_is_silent_and_keeps_the_pages_until_it_lands() -> None:
    harness = ahead(pages=5)
    req, other = make_req(PROMPT, uid=1, output_len=9), make_req([1], uid=2, output_len=2)
    harness.admit(req)
    harness.step()
    harness.do(commands.Cancel(req.key))
    assert (harness.counts().held, harness.core.has_work()) == (4, True)
    waiting = harness.reserve(make_req(range(50, 58), uid=3, output_len=8))
    assert harness.reply(waiting) is None
    harness.step()
    assert harness.tokens(req.key) == [] and harness.granted(waiting)
    harness.do(commands.Release(harness.granted(waiting).ticket, drained=True))
    harness.admit(other)
    harness.run()
    assert len(harness.tokens(other.key)) == 2
    harness.assert_idle()


def test_a_session_closed_with_a_step_in_the_air_leaves_nothing_behind() -> None:
    harness = ahead()
    for uid in (1, 2):
        harness.admit(make_req([*PROMPT, uid], uid=uid, output_len=9))
    harness.step()
    harness.new_events()
    harness.do(commands.SessionClosed(EPOCH))
    harness.run()
    assert not [event for event in harness.new_events() if isinstance(event, events.StepTokens | events.Retracted)]
    harness.assert_idle()


def test_handing_back_with_a_step_in_the_air_drops_its_tokens_and_keeps_those_that_landed() -> None:
    harness = ahead()
    req = make_req(PROMPT, output_len=20)
    harness.admit(req)
    for _ in range(3):
        harness.step()
    harness.core.handle(commands.Drain(), 1000)
    harness.do(commands.HandBack())
    assert [event.key for event in harness.new_events() if isinstance(event, events.Retracted)] == [req.key]
    assert harness.reply(1000) is None
    harness.run()
    assert [token.token_id for token in harness.tokens(req.key)] == continuation(PROMPT, 3)
    assert harness.reply(1000) is not None
    harness.assert_idle()


def test_out_of_pages_the_step_in_the_air_lands_before_anybody_is_retracted() -> None:
    harness = ahead(pages=6)
    first, second = make_req(PROMPT[:8], uid=1, output_len=9), make_req(range(30, 38), uid=2, output_len=9)
    harness.admit(first)
    harness.admit(second)
    order: list[object] = []
    while harness.core.has_work():
        harness.step()
        order += [type(event) for event in harness.new_events() if isinstance(event, events.StepTokens | events.Retracted)]
    (retracted,) = harness.told(events.Retracted)
    assert retracted.key == second.key and order[: order.index(events.Retracted)] == [events.StepTokens] * 4
    assert [token.token_id for token in harness.tokens(second.key)] == continuation(range(30, 38), 5)
    assert [token.token_id for token in harness.tokens(first.key)] == continuation(PROMPT[:8], 9)
    harness.assert_idle()


def test_nobody_is_retracted_if_the_step_in_the_air_frees_the_page() -> None:
    harness = ahead(pages=6)
    ends = make_req(PROMPT[:8], uid=1, output_len=5)  # Takes its last token as the other needs a page.
    goes_on = make_req(range(30, 38), uid=2, output_len=8)
    harness.admit(ends)
    harness.admit(goes_on)
    harness.run()
    assert not harness.told(events.Retracted)
    assert [token.token_id for token in harness.tokens(goes_on.key)] == continuation(range(30, 38), 8)
    harness.assert_idle()


def test_a_ticket_filled_while_a_step_is_in_the_air_is_not_written_over() -> None:
    """The peer's GPU writes when it likes: the fake device, as late as it can."""
    harness = ahead(pages=8, max_running=2)
    req = stopping(PROMPT, 3)
    harness.admit(req)
    taker = make_req(range(60, 75), uid=2, output_len=6)
    call = harness.reserve(taker)
    while harness.reply(call) is None:
        harness.step()
    granted = harness.granted(call)
    fill(harness.runner.pool, taker, granted.page_ids, granted.prefix_len)
    harness.run()
    harness.do(commands.Commit(granted.ticket, first_tokens(taker), len(granted.page_ids)))
    harness.run()
    assert [token.token_id for token in harness.tokens(taker.key)] == continuation(range(60, 75), 6)
    harness.assert_idle()
