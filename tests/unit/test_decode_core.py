"""One request's life in the decode core."""

from __future__ import annotations

import pytest

from common.errors import AlreadyExists, InvalidRequest, OutOfRange
from common.work import FinishReason
from common.work_key import WorkKey
from decode_worker import commands, events
from tests.helpers.decode_core import EPOCH, PROMPT, Harness, fill, first_tokens, make_req
from tests.helpers.fake_runner import continuation

pytestmark = pytest.mark.usefixtures("each_lookahead")


def test_a_committed_request_runs_to_its_length_and_repeats_its_first_token() -> None:
    harness = Harness()
    req = make_req(PROMPT, output_len=6)
    harness.admit(req)
    harness.run()
    tokens = harness.tokens(req.key)
    expected = continuation(PROMPT, 6)
    assert [(token.index, token.token_id) for token in tokens] == list(enumerate(expected))
    assert [token.finish for token in tokens] == [None] * 5 + [FinishReason.LENGTH]
    harness.assert_idle()


def test_the_first_message_of_a_request_has_two_tokens_and_the_others_one() -> None:
    harness = Harness()
    for uid in (1, 2):
        harness.admit(make_req([*PROMPT, uid], uid=uid, output_len=4))
    harness.run()
    steps = [[token.key.uid for token in event.tokens] for event in harness.told(events.StepTokens)]
    assert steps == [[1, 1, 2, 2], [1, 2], [1, 2]]


def test_one_step_makes_one_event_per_router() -> None:
    harness = Harness()
    harness.do(commands.SessionOpened(8))
    for uid, epoch in ((1, EPOCH), (2, 8), (3, EPOCH)):
        harness.admit(make_req([*PROMPT, uid], uid=uid, epoch=epoch))
    harness.new_events()
    harness.step_and_land()
    steps = [event for event in harness.new_events() if isinstance(event, events.StepTokens)]
    assert {step.router_epoch: {token.key.uid for token in step.tokens} for step in steps} == {EPOCH: {1, 3}, 8: {2}}
    assert len(steps) == 2


def test_the_repeated_first_token_carries_its_logprobs_and_every_later_one_its_own() -> None:
    harness = Harness()
    req = make_req(PROMPT, logprobs=2)
    granted = harness.granted(harness.reserve(req))
    (token,) = first_tokens(req)
    first = type(token)(token.key, token.index, token.token_id, -0.25, ((1, -0.25), (2, -3.0)))
    harness.core.handle(commands.Commit(granted.ticket, (first,), len(granted.page_ids)), None)
    fill(harness.runner.pool, req, granted.page_ids, granted.prefix_len)
    harness.run()
    tokens = harness.tokens(req.key)
    assert tokens[0] == first
    assert all(token.logprob == -0.5 and len(token.top) == 2 for token in tokens[1:])


def test_pages_that_are_cached_are_not_sent_again() -> None:
    harness = Harness()
    harness.admit(make_req(PROMPT, uid=1))
    harness.run()
    granted = harness.granted(harness.reserve(make_req(PROMPT, uid=2)))
    assert (granted.prefix_len, len(granted.page_ids)) == (8, 1)
    harness.commit(make_req(PROMPT, uid=2), granted)
    harness.run()
    assert [token.token_id for token in harness.tokens(WorkKey(EPOCH, 2, 1))] == continuation(PROMPT, 4)
    harness.assert_idle()


def test_hnd_04_a_prompt_of_whole_cached_pages_needs_no_byte_and_still_commits() -> None:
    harness = Harness()
    prompt = PROMPT[:8]
    harness.admit(make_req(prompt, uid=1))
    harness.run()
    req = make_req(prompt, uid=2)
    granted = harness.granted(harness.reserve(req, transport="grpc"))
    assert (granted.prefix_len, granted.page_ids) == (8, ())
    harness.commit(req, granted)
    harness.run()
    assert [token.token_id for token in harness.tokens(req.key)] == continuation(prompt, 4)
    harness.assert_idle()


def test_a_continuation_goes_on_from_the_output_it_was_given() -> None:
    harness = Harness()
    whole = continuation(PROMPT, 6)
    req = make_req([*PROMPT, *whole[:3]], attempt=2, prompt_len=len(PROMPT), output_len=3)
    harness.admit(req)
    harness.run()
    tokens = harness.tokens(req.key)
    assert [(token.index, token.token_id) for token in tokens] == list(enumerate(whole))[3:]
    assert tokens[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8], ids=lambda size: f"prompt-{size}")
def test_bnd_05_prompts_around_a_page_decode_right(size: int) -> None:
    harness = Harness()
    prompt = list(range(30, 30 + size))
    req = make_req(prompt, output_len=10)
    harness.admit(req)
    harness.run()
    assert [token.token_id for token in harness.tokens(req.key)] == continuation(prompt, 10)
    harness.assert_idle()


def test_a_request_that_needs_the_whole_pool_fits_it_exactly() -> None:
    harness = Harness(pages=4)
    for uid, (length, output) in enumerate([(14, 2), (8, 8), (1, 15)]):
        req = make_req(range(50 * uid, 50 * uid + length), uid=uid, output_len=output)
        harness.admit(req)
        harness.run()
        assert len(harness.tokens(req.key)) == output
        harness.assert_idle()


def test_completions_share_the_prompts_pages_and_differ_in_output() -> None:
    harness = Harness(pages=12)
    req = make_req(PROMPT, n=3, output_len=6)
    granted = harness.granted(harness.reserve(req))
    assert len(granted.page_ids) == 3
    harness.commit(req, granted)
    assert harness.counts().held == 3 + 2 + 3  # prompt, copies of its last page, growth
    harness.run()
    for i in range(3):
        assert [token.token_id for token in harness.tokens(req.key.for_completion(i))] == continuation(PROMPT, 6, i)
    harness.assert_idle()


def test_max_running_bounds_the_batch_and_the_rest_joins_in_order() -> None:
    harness = Harness(max_running=2)
    for uid in (3, 1, 2):
        harness.admit(make_req([*PROMPT, uid], uid=uid, output_len=3))
    harness.run()
    assert [[uid for uid, _ in batch] for batch in harness.runner.batches] == [[1, 2], [1, 2], [3], [3]]


def test_a_key_that_has_a_ticket_or_runs_is_refused() -> None:
    harness = Harness()
    req = make_req(PROMPT, n=2)
    granted = harness.granted(harness.reserve(req))
    with pytest.raises(AlreadyExists, match="ticket"):
        harness.reserve(make_req(PROMPT, uid=2))
    harness.commit(req, granted)
    with pytest.raises(AlreadyExists, match="runs"):
        harness.reserve(make_req(PROMPT, uid=2))


@pytest.mark.parametrize(
    ("length", "output", "n", "limit"),
    [(10, 119, 1, "128 tokens"), (40, 30, 1, "64 tokens"), (30, 6, 9, "16 pages")],
    ids=["context", "pool", "n"],
)
def test_cap_02_a_request_that_can_never_fit_is_refused_at_once_naming_the_limit(
    length: int, output: int, n: int, limit: str
) -> None:
    harness = Harness(pages=16)
    with pytest.raises(OutOfRange, match=limit):
        harness.reserve(make_req(range(length), output_len=output, n=n))
    harness.assert_idle()


def test_a_single_token_to_make_reserves_nothing() -> None:
    with pytest.raises(InvalidRequest, match="output_len must be at least 2"):
        Harness().reserve(make_req(PROMPT, output_len=1))


def test_flush_drops_cached_pages_that_nobody_uses() -> None:
    harness = Harness()
    harness.admit(make_req(PROMPT, uid=1))
    harness.run()
    harness.admit(make_req(range(60, 70), uid=2, output_len=20))
    harness.step()
    assert harness.do(commands.FlushPrefixCache()) == 3
    harness.run()
    assert len(harness.tokens(WorkKey(EPOCH, 2, 1))) == 20


def test_stats_are_sent_when_something_changed_and_at_most_once_a_step() -> None:
    harness = Harness()
    harness.tick()
    harness.new_events()
    harness.tick()
    assert harness.new_events() == []
    harness.admit(make_req(PROMPT, output_len=3))
    harness.tick()
    (stats,) = [event for event in harness.new_events() if isinstance(event, events.Stats)]
    assert (stats.running, stats.waiting) == (0, 1)
    harness.step()
    (stats,) = [event for event in harness.new_events() if isinstance(event, events.Stats)]
    assert (stats.running, stats.waiting, stats.pages.held) == (1, 0, 3)
    harness.run()
    (stats,) = [event for event in harness.new_events() if isinstance(event, events.Stats)]
    assert (stats.running, stats.waiting, stats.pages.held) == (0, 0, 0)


def test_a_lost_page_ends_the_engine_as_soon_as_it_is_idle() -> None:
    harness = Harness()
    harness.admit(make_req(PROMPT))
    harness.core._pool.try_allocate(1)
    with pytest.raises(AssertionError, match="still held"):
        harness.run()


def test_an_inquiry_is_answered_by_whether_the_request_goes_on_without_its_sender() -> None:
    harness = Harness()
    req = make_req(PROMPT, output_len=6)

    def holds() -> bool:
        harness.new_events()
        harness.do(commands.Inquire(req.key))
        (answer,) = (event for event in harness.new_events() if isinstance(event, events.Holding))
        assert answer.key == req.key
        return answer.is_committed

    assert not holds(), "never heard of"
    granted = harness.granted(harness.reserve(req))
    assert not holds(), "being received"
    fill(harness.runner.pool, req, granted.page_ids, granted.prefix_len)
    harness.do(commands.Commit(granted.ticket, first_tokens(req), len(granted.page_ids)))
    assert holds(), "waits for a place in the batch"
    harness.step_and_land()
    assert holds(), "runs"
    harness.run()
    assert not holds(), "has ended"
    harness.assert_idle()
