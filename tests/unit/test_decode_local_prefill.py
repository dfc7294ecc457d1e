"""A decode worker that computes prompts itself: one engine, steps of prompts and of running requests in turns."""

from __future__ import annotations

import pytest

from common.core import SamplingParams
from common.work import FinishReason
from decode_worker import events
from tests.helpers.decode_core import PROMPT, Harness, colocated, make_req
from tests.helpers.fake_runner import continuation

pytestmark = pytest.mark.usefixtures("each_lookahead")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 21])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
def test_a_prompt_is_computed_and_decoded_here(length: int, chunk_tokens: int) -> None:
    harness = colocated(chunk_tokens=chunk_tokens)
    prompt = list(range(30, 30 + length))
    key = harness.prefill(make_req(prompt, output_len=10))
    harness.run()
    assert harness.ids(key) == continuation(prompt, 10)
    assert harness.tokens(key)[-1].finish is FinishReason.LENGTH
    assert harness.told(events.PrefillStarted) == [events.PrefillStarted(key, 0)]
    harness.assert_idle()


def test_what_is_cached_is_not_computed_and_token_0_says_how_much() -> None:
    harness = colocated()
    for uid, cached in ((1, 0), (2, 8), (3, 8)):
        before = harness.runner.computed_tokens
        key = harness.prefill(make_req(PROMPT, uid=uid, output_len=3))
        harness.run()
        assert harness.tokens(key)[0].cached_tokens == cached == harness.told(events.PrefillStarted)[-1].cached_tokens
        assert harness.runner.computed_tokens - before == len(PROMPT) - cached + 2
        assert harness.ids(key) == continuation(PROMPT, 3)
    whole = harness.prefill(make_req(PROMPT[:8], uid=4, output_len=3))  # The last token is computed in any case (HND-04).
    harness.run()
    assert harness.tokens(whole)[0].cached_tokens == 4 and harness.ids(whole) == continuation(PROMPT[:8], 3)
    harness.assert_idle()


def test_output_is_a_prefix_hit_for_the_next_turn_of_the_conversation() -> None:
    harness = colocated()
    harness.prefill(make_req(PROMPT, uid=1, output_len=7))
    harness.run()
    turn = [*PROMPT, *continuation(PROMPT, 7), 5]
    key = harness.prefill(make_req(turn, uid=2, output_len=2))
    harness.run()
    assert harness.tokens(key)[0].cached_tokens == 16 and harness.ids(key) == continuation(turn, 2)


@pytest.mark.parametrize("output_len", [1, 2])
def test_a_short_output_ends_at_once(output_len: int) -> None:
    harness = colocated()
    key = harness.prefill(make_req(PROMPT, n=3, output_len=output_len))
    harness.run()
    for i in range(3):
        assert harness.ids(key.for_completion(i)) == continuation(PROMPT, output_len, i)
        assert harness.tokens(key.for_completion(i))[-1].finish is FinishReason.LENGTH
    harness.assert_idle()


def test_an_output_that_ends_with_its_first_token_is_not_decoded() -> None:
    harness = colocated()
    sampling = SamplingParams(max_tokens=9, seed=1, stop_token_ids=tuple(continuation(PROMPT, 1)))
    key = harness.prefill(make_req(PROMPT, output_len=9, sampling=sampling))
    harness.run()
    (token,) = harness.tokens(key)
    assert token.finish is FinishReason.STOP and harness.runner.computed_tokens == len(PROMPT)
    harness.assert_idle()


def test_prompts_and_running_requests_take_turns_and_a_step_of_prompts_is_bounded() -> None:
    harness = colocated(pages=64)
    running = harness.prefill(make_req([1, 2], uid=1, output_len=20))
    harness.step_and_land()
    harness.runner.batches.clear()
    late = harness.prefill(make_req(range(40, 56), uid=2, output_len=2))
    harness.run()
    kinds = ["decode" if batch == [(1, 1)] else "prompt" for batch in harness.runner.batches]
    first = kinds.index("prompt")
    assert kinds[first : first + 7] == ["prompt", "decode"] * 3 + ["prompt"]
    assert all(sum(tokens for _, tokens in batch) <= 4 for batch in harness.runner.batches)
    assert harness.ids(running) == continuation([1, 2], 20) and harness.ids(late) == continuation(range(40, 56), 2)
    harness.assert_idle()


def test_a_prompt_starts_only_when_its_completions_will_have_places() -> None:
    harness = colocated(max_running=2, chunk_tokens=100)
    keys = [harness.prefill(make_req([*PROMPT, uid], uid=uid, output_len=4)) for uid in (1, 2, 3)]
    harness.step_and_land()
    assert [event.key for event in harness.told(events.PrefillStarted)] == keys[:2]
    harness.run()
    assert [harness.ids(key) for key in keys] == [continuation([*PROMPT, uid], 4) for uid in (1, 2, 3)]
    crowd = harness.prefill(make_req(PROMPT, uid=10, n=5, output_len=4))
    harness.run()
    assert [harness.ids(crowd.for_completion(i)) for i in range(5)] == [continuation(PROMPT, 4, i) for i in range(5)]
    harness.assert_idle()


@pytest.mark.parametrize(("shape", "retryable", "why"), [("off", True, "never"), ("full", True, "limit"), ("large", False, "64")])
def test_what_cannot_be_taken_is_refused_saying_why(shape: str, retryable: bool, why: str) -> None:
    harness = Harness() if shape == "off" else colocated(pages=16, max_prompts=0 if shape == "full" else 10)
    harness.prefill(make_req(range(60), n=2, output_len=8))
    failures = [event.failure for event in harness.told(events.Failed)]
    assert [(failure.key.uid, failure.retryable) for failure in failures] == [(1, retryable), (2, retryable)]
    assert why in failures[0].message
    harness.assert_idle()


def test_prompts_and_grants_to_senders_stand_in_one_line() -> None:
    harness = colocated(pages=8)
    first = make_req(range(40, 60), uid=1, output_len=4)
    granted = harness.granted(harness.reserve(first))
    local = harness.prefill(make_req(range(70, 90), uid=2, output_len=4))
    call = harness.reserve(make_req(range(100, 120), uid=3, output_len=4))
    assert not harness.core.has_work() and harness.reply(call) is None
    harness.commit(first, granted)
    harness.run()
    assert harness.ids(local) == continuation(range(70, 90), 4) and harness.granted(call)


def test_load_tells_prompt_tokens_in_line_and_under_way() -> None:
    harness = colocated(max_running=1)
    for uid in (1, 2):
        harness.prefill(make_req([*PROMPT, uid], uid=uid, output_len=4))
    harness.tick()
    stats = harness.told(events.Stats)[-1]
    assert (stats.running, stats.waiting, stats.queued_tokens) == (1, 1, 22)
    harness.step()
    assert harness.told(events.Stats)[-1].queued_tokens == 18
    harness.run()
    assert harness.told(events.Stats)[-1].queued_tokens == 0


def test_out_of_pages_the_youngest_is_retracted_and_the_oldest_ends() -> None:
    harness = colocated(pages=7, chunk_tokens=100)
    keys = [harness.prefill(make_req(range(30 * uid, 30 * uid + 8), uid=uid, output_len=12)) for uid in (1, 2, 3)]
    harness.run()
    retracted = [event.key for event in harness.told(events.Retracted)]
    assert keys[1] in retracted and keys[0] not in retracted
    assert harness.ids(keys[0]) == continuation(range(30, 38), 12)
    harness.assert_idle()


def test_a_continuation_goes_on_from_the_output_it_was_given() -> None:
    harness = colocated()
    whole = continuation(PROMPT, 6)
    key = harness.prefill(make_req([*PROMPT, *whole[:3]], attempt=2, prompt_len=len(PROMPT), output_len=3))
    harness.run()
    assert [(token.index, token.token_id) for token in harness.tokens(key)] == list(enumerate(whole))[3:]
