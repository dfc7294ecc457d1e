"""Which Commits the decode core takes, and what they begin."""

from __future__ import annotations

import pytest

from common.errors import Aborted, DataLoss, FailedPrecondition, InvalidRequest, NotFound
from common.work import FinishReason
from common.work_key import WorkKey
from decode_worker import commands
from tests.helpers.decode_core import PROMPT, Harness, fill, first_tokens, make_req

pytestmark = pytest.mark.usefixtures("each_lookahead")


def test_a_commit_token_without_epoch_comes_out_with_its_routers_epoch() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req))
    fill(harness.runner.pool, req, granted.page_ids, granted.prefix_len)
    tokens = tuple(token._replace(key=WorkKey(0, token.key.uid, token.key.attempt)) for token in first_tokens(req))
    harness.do(commands.Commit(granted.ticket, tokens, len(granted.page_ids)))
    harness.step_and_land()
    assert [token.index for token in harness.tokens(req.key)] == [0, 1]


def test_a_completion_whose_first_token_ended_it_is_not_run() -> None:
    harness = Harness()
    req = make_req(PROMPT, n=3)
    granted = harness.granted(harness.reserve(req))
    harness.commit(req, granted, finish=[None, FinishReason.STOP, None])
    harness.run()
    assert [bool(harness.tokens(req.key.for_completion(i))) for i in range(3)] == [True, False, True]
    harness.assert_idle()


def test_a_ticket_whose_completions_all_ended_gives_everything_back_at_commit() -> None:
    harness = Harness()
    req = make_req(PROMPT, n=2)
    harness.commit(req, harness.granted(harness.reserve(req)), finish=[FinishReason.STOP, FinishReason.STOP])
    assert not harness.core.has_work()
    harness.assert_idle()


def test_a_completion_cancelled_before_commit_is_not_run() -> None:
    harness = Harness()
    req = make_req(PROMPT, n=2)
    granted = harness.granted(harness.reserve(req))
    harness.do(commands.Cancel(req.key))
    harness.commit(req, granted)
    harness.run()
    assert not harness.tokens(req.key)
    assert len(harness.tokens(req.key.for_completion(1))) == 4
    harness.assert_idle()


def test_commit_is_refused_while_pages_are_missing_and_taken_after() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req))
    with pytest.raises(FailedPrecondition, match="2 of 3 sent"):
        harness.do(commands.Commit(granted.ticket, first_tokens(req), 2))
    harness.commit(req, granted)
    harness.run()
    assert len(harness.tokens(req.key)) == 4


def test_commit_repeated_gets_the_same_answer_and_runs_nothing_twice() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req))
    harness.commit(req, granted)
    again = commands.Commit(granted.ticket, first_tokens(req), len(granted.page_ids))
    harness.do(again)
    harness.run()
    harness.do(again)
    assert len(harness.tokens(req.key)) == 4
    harness.tick(21)
    with pytest.raises(NotFound):
        harness.do(again)


@pytest.mark.parametrize("spoil", ["count", "uid", "index"])
def test_first_tokens_of_another_request_are_refused(spoil: str) -> None:
    harness = Harness()
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req))
    wrong = {
        "count": (),
        "uid": first_tokens(make_req(PROMPT, uid=9)),
        "index": first_tokens(make_req([*PROMPT, 1], prompt_len=len(PROMPT))),
    }[spoil]
    with pytest.raises(InvalidRequest, match="first_tokens"):
        harness.do(commands.Commit(granted.ticket, wrong, len(granted.page_ids)))
    harness.commit(req, granted)


def test_checksums_that_agree_pass_and_one_that_differs_ends_the_ticket() -> None:
    harness = Harness()
    good = make_req(PROMPT, uid=1)
    harness.commit(good, harness.granted(harness.reserve(good, verify=True)), verify=True)
    harness.run()
    assert len(harness.tokens(good.key)) == 4
    bad = make_req([*PROMPT[:-1], 99], uid=2)
    granted = harness.granted(harness.reserve(bad, verify=True))
    with pytest.raises(DataLoss, match="checksum"):
        harness.do(commands.Commit(granted.ticket, first_tokens(bad), len(granted.page_ids), (0xBAD,) * len(granted.page_ids)))
    with pytest.raises(Aborted, match="checksum"):
        harness.do(commands.Commit(granted.ticket, first_tokens(bad), len(granted.page_ids)))
    harness.assert_idle()


def test_verify_without_checksums_is_refused() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req, verify=True))
    with pytest.raises(FailedPrecondition, match="checksums are missing"):
        harness.do(commands.Commit(granted.ticket, first_tokens(req), len(granted.page_ids)))
