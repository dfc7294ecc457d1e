"""Who gives way when the decode core is out of pages, and who waits."""

from __future__ import annotations

import pytest

from common.work import FinishReason
from decode_worker import commands, events
from tests.helpers.decode_core import Harness, first_tokens, make_req
from tests.helpers.fake_runner import continuation

pytestmark = pytest.mark.usefixtures("each_lookahead")
PROMPT = list(range(10, 20))  # Three pages of 4; a fourth for growth.


def test_out_of_pages_the_youngest_is_retracted_and_the_oldest_finishes() -> None:
    harness = Harness(pages=8)
    old, young = make_req(PROMPT, uid=1, output_len=20), make_req([*PROMPT[:-1], 77], uid=2, output_len=20)
    harness.admit(young)
    harness.admit(old)
    harness.run()
    assert [event.key.uid for event in harness.told(events.Retracted)] == [2]
    assert [token.token_id for token in harness.tokens(old.key)] == continuation(PROMPT, 20)
    harness.assert_idle()


def test_priority_decides_who_counts_as_young() -> None:
    harness = Harness(pages=8)
    low, high = make_req(PROMPT, uid=1, output_len=20), make_req([*PROMPT, 7], uid=2, output_len=20, priority=1)
    harness.admit(low)
    harness.admit(high)
    harness.run()
    assert [event.key.uid for event in harness.told(events.Retracted)] == [1]
    assert len(harness.tokens(high.key)) == 20


def test_a_committed_request_that_waits_for_a_slot_gives_its_pages_before_the_oldest_starves() -> None:
    harness = Harness(pages=8, max_running=1)
    old, waiting = make_req(PROMPT, uid=1, output_len=20), make_req([*PROMPT, 7], uid=2)
    harness.admit(old)
    harness.admit(waiting)
    harness.run()
    assert [event.key.uid for event in harness.told(events.Retracted)] == [2]
    assert not harness.tokens(waiting.key)
    assert len(harness.tokens(old.key)) == 20


def test_nobody_is_granted_pages_while_a_running_request_lacks_one() -> None:
    harness = Harness(pages=8)
    old = make_req(PROMPT, uid=2, output_len=20)
    harness.admit(old)
    receiving = harness.granted(harness.reserve(make_req(range(40, 50), uid=3)))
    harness.run()
    assert len(harness.tokens(old.key)) < 20  # Starved: the other pages are being filled, and nobody can be retracted.
    assert not harness.core.has_work()
    small = make_req([5], uid=1, output_len=2)
    older = harness.reserve(small)
    assert harness.reply(older) is None
    harness.do(commands.Release(receiving.ticket, drained=True))
    assert harness.core.has_work()
    assert harness.reply(older) is None
    harness.step()
    harness.commit(small, harness.granted(older))
    harness.run()
    assert [token.token_id for token in harness.tokens(old.key)] == continuation(PROMPT, 20)


def test_a_starved_engine_sleeps_and_looks_again_at_each_tick() -> None:
    harness = Harness(pages=8)
    old = make_req(PROMPT, uid=1, output_len=20)
    harness.admit(old)
    harness.reserve(make_req(range(40, 50), uid=2))
    harness.run()
    assert not harness.core.has_work()
    harness.tick(11)  # The other's lease is over, but its sender may still write: quarantined.
    harness.run()
    assert len(harness.tokens(old.key)) < 20
    harness.do(commands.SenderGone("pair"))
    harness.run()
    assert len(harness.tokens(old.key)) == 20


def test_cap_04_a_pool_for_two_serves_twenty_requests_through_retraction() -> None:
    harness = Harness(pages=16, max_running=8)
    answers = serve_all(harness, {uid: [uid, *PROMPT[1:]] for uid in range(1, 21)}, output_len=22)
    for uid, tokens in answers.items():
        assert tokens == continuation([uid, *PROMPT[1:]], 22), f"uid {uid}"
    assert any(isinstance(event, events.Retracted) for event in harness.events), "the pool was never short"
    harness.assert_idle()


def serve_all(harness: Harness, prompts: dict[int, list[int]], *, output_len: int) -> dict[int, list[int]]:
    """Router and prefill worker of many requests: attempts as long as they are retracted; the tokens by uid."""
    streamed: dict[int, list[int]] = {uid: [] for uid in prompts}
    attempts = dict.fromkeys(prompts, 1)
    asked = {}

    def ask(uid: int) -> None:
        done = streamed[uid]
        if output_len - len(done) == 1:  # The prefill worker makes a single token alone.
            done += continuation([*prompts[uid], *done], 1)
            return
        req = make_req(
            [*prompts[uid], *done],
            uid=uid,
            attempt=attempts[uid],
            prompt_len=len(prompts[uid]),
            output_len=output_len - len(done),
        )
        asked[harness.reserve(req)] = req

    for uid in prompts:
        ask(uid)
    for _ in range(5000):
        if not asked and not harness.core.has_work():
            break
        for call_id, req in list(asked.items()):
            if harness.reply(call_id) is not None:
                del asked[call_id]
                (token,) = first_tokens(req)
                assert token.index == len(streamed[req.uid])
                streamed[req.uid].append(token.token_id)
                harness.commit(req, harness.granted(call_id))
        harness.new_events()
        harness.run(1)
        for event in harness.new_events():
            if isinstance(event, events.StepTokens):
                for token in event.tokens:
                    tokens = streamed[token.key.uid]
                    assert token.key.attempt == attempts[token.key.uid]
                    assert token.index <= len(tokens)
                    if token.index == len(tokens):
                        tokens.append(token.token_id)
                    assert (token.finish is FinishReason.LENGTH) == (token.index + 1 == output_len)
            elif isinstance(event, events.Retracted):
                attempts[event.key.uid] += 1
                ask(event.key.uid)
    return streamed
