"""Commands, steps and passing time in any order: pages always have one owner, first tokens are right, the end is idle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import OutOfRange
from common.handoff.base import pages_to_send
from common.work_key import WorkKey
from prefill_worker.commands import Destination, Extend, FlushPrefixCache
from prefill_worker.events import Broken, PrefillDone
from tests.helpers.fake_runner import next_token
from tests.helpers.prefill_core import CoreDriver, make_req

PAGE = 4
LEASE = 10.0


class Prefill(RuleBasedStateMachine):
    """Prompts over a small alphabet, so that prefixes are shared; a pool too small for all of them."""

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.driver = CoreDriver(
            num_pages=12, page_size=PAGE, max_context=48, max_running=3, chunk_tokens=5, lookahead=self.lookahead
        )
        self.prompts: dict[WorkKey, list[int]] = {}
        self.started: set[WorkKey] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=47),
        priority=st.integers(0, 1),
        n=st.integers(1, 2),
        output_len=st.integers(1, 3),
    )
    def admit(self, prompt: list[int], priority: int, n: int, output_len: int) -> None:
        uid = 10 * len(self.prompts)
        key = self.driver.admit(make_req(prompt, uid=uid, priority=priority, n=n, output_len=output_len))
        self.prompts[key] = prompt

    @rule(length=st.integers(49, 60))
    def refuse(self, length: int) -> None:
        with pytest.raises(OutOfRange):
            self.driver.admit(make_req([0] * length, uid=9999))

    @precondition(lambda self: self.ready_to_start())
    @rule(data=st.data(), prefix_pages=st.integers(0, 11))
    def compute(self, data: st.DataObject, prefix_pages: int) -> None:
        key = data.draw(st.sampled_from(self.ready_to_start()))
        length = len(self.prompts[key])
        prefix_len = min(prefix_pages, length // PAGE) * PAGE
        pages = pages_to_send(input_len=length, prefix_len=prefix_len, page_size=PAGE)
        destination = Destination("grpc", tuple(range(pages)), prefix_len, deadline=self.driver.clock + LEASE)
        self.driver.compute(key, data.draw(st.sampled_from([destination, None])))
        self.started.add(key)

    @precondition(lambda self: self.driver.core.has_work())
    @rule()
    def step(self) -> None:
        self.driver.step()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.driver.forget(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        self.driver.abandon(data.draw(st.sampled_from(self.live())))

    @rule(seconds=st.floats(0, LEASE))
    def pass_time(self, seconds: float) -> None:
        self.driver.clock += seconds
        self.driver.core.tick(self.driver.clock)

    @rule()
    def renew(self) -> None:
        self.driver.do(Extend(dict.fromkeys(self.started, self.driver.clock + LEASE)))

    @rule()
    def flush(self) -> None:
        self.driver.do(FlushPrefixCache())

    @invariant()
    def first_tokens_are_those_of_the_prompt(self) -> None:
        for event in self.driver.events:
            if isinstance(event, PrefillDone):
                prompt = self.prompts[event.key]
                assert [token.token_id for token in event.tokens] == [next_token(prompt, i) for i in range(len(event.tokens))]

    @invariant()
    def every_request_ends_at_most_once(self) -> None:
        ended = [event.key for event in self.driver.events if isinstance(event, PrefillDone | Broken)]
        assert len(ended) == len(set(ended))

    def teardown(self) -> None:
        for key in self.prompts:
            self.driver.forget(key)
        self.driver.assert_idle()
        assert not self.driver.core.has_work()

    def live(self) -> list[WorkKey]:
        return [key for key in self.prompts if key in self.driver.core._jobs]

    def ready_to_start(self) -> list[WorkKey]:
        return [key for key in self.live() if key in self.driver.admitted and key not in self.started]


class PrefillAhead(Prefill):
    """Over a runner that launches a step before the last one's tokens are read."""

    lookahead = 1


Prefill.TestCase.settings = PrefillAhead.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPrefill = pytest.mark.unit(Prefill.TestCase)
TestPrefillAhead = pytest.mark.unit(PrefillAhead.TestCase)
