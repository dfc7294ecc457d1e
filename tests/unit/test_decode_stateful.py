"""The decode core under random orders of everything: pages are conserved, an ended key is silent, tokens are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from common.core import Req, SamplingParams
from common.engine.handle import Reply
from common.errors import PdserveError
from common.handoff.base import SENDER_WRITES, TRANSPORTS
from common.work_key import WorkKey
from decode_worker import commands, events
from decode_worker.local_prefill import PromptLimits
from tests.helpers.decode_core import EPOCH, LEASE, Harness, make_req
from tests.helpers.fake_runner import continuation

EPOCHS = (EPOCH, EPOCH + 1)
PAIRS = ("pair-0", "pair-1")


class DecodeMachine(RuleBasedStateMachine):
    """Model: which keys have ended for their router, and which granted tickets are not yet committed, ended or drained."""

    lookahead = 0
    calls = Bundle("calls")

    @initialize(pages=st.integers(6, 24), page_size=st.sampled_from([1, 2, 4]), max_running=st.integers(1, 4))
    def start(self, pages: int, page_size: int, max_running: int) -> None:
        self.harness = Harness(
            pages=pages,
            page_size=page_size,
            max_running=max_running,
            max_context=64,
            lookahead=self.lookahead,
            local_prefill=PromptLimits(5),
        )
        self.local: set[int] = set()
        self.harness.do(commands.SessionOpened(EPOCHS[1]))
        self.open = set(EPOCHS)
        self.gone: set[str] = set()
        self.next_uid = 0
        self.reqs: dict[int, Req] = {}
        self.tickets: dict[str, Req] = {}
        self.silent: set[WorkKey] = set()
        self.streamed: dict[WorkKey, list[int]] = {}
        self.seen = 0
        self.committed: set[str] = set()

    @rule(
        target=calls,
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        output_len=st.integers(2, 8),
        n=st.integers(1, 3),
        transport=st.sampled_from(TRANSPORTS),
        epoch=st.sampled_from(EPOCHS),
        pair=st.sampled_from(PAIRS),
        priority=st.integers(0, 1),
        verify=st.booleans(),
        stop_after=st.integers(1, 8),
    )
    def reserve(
        self,
        prompt: list[int],
        output_len: int,
        n: int,
        transport: Any,
        epoch: int,
        pair: str,
        priority: int,
        verify: bool,
        stop_after: int,
    ) -> int:
        stops = tuple(continuation(prompt, stop_after)[1:][-1:])  # No stop token comes first: that would be the sender's to see.
        sampling = SamplingParams(max_tokens=output_len, seed=1, stop_token_ids=stops)
        req = make_req(prompt, uid=self.next_uid, output_len=output_len, n=n, epoch=epoch, priority=priority, sampling=sampling)
        self.next_uid += n
        if pair in self.gone and transport in SENDER_WRITES:
            return -1  # The event loop refuses it (decode_worker/pairs.py).
        try:
            call_id = self.harness.reserve(req, transport=transport, pair_id=pair, verify=verify)
        except PdserveError:
            return -1
        self.reqs[call_id] = req
        return call_id

    @rule(
        target=calls,
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        output_len=st.integers(1, 8),
        n=st.integers(1, 3),
        epoch=st.sampled_from(EPOCHS),
        stop_after=st.integers(1, 8),
        seconds=st.sampled_from([1.0, math.inf]),
    )
    def prefill(self, prompt: list[int], output_len: int, n: int, epoch: int, stop_after: int, seconds: float) -> int:
        """A prompt for this worker to compute; known by a number that no call has."""
        sampling = SamplingParams(max_tokens=output_len, seed=1, stop_token_ids=tuple(continuation(prompt, stop_after)[-1:]))
        req = make_req(prompt, uid=self.next_uid, output_len=output_len, n=n, epoch=epoch, sampling=sampling)
        number = -2 - self.next_uid
        self.reqs[number] = req
        self.local |= set(range(self.next_uid, self.next_uid + n))
        self.next_uid += n
        self.harness.prefill(req, deadline=self.harness.now + seconds)
        return number

    @rule(call_id=calls)
    def abandon(self, call_id: int) -> None:
        if self.granted(call_id) is None:
            self.harness.core.abandon(call_id)

    @rule(call_id=calls, verify=st.booleans())
    def commit(self, call_id: int, verify: bool) -> None:
        granted = self.granted(call_id)
        if granted is None:
            return
        req = self.reqs[call_id]
        lost = self.harness.do(commands.Renew((granted.ticket,)))
        try:
            if lost or granted.ticket in self.committed:
                # Too late, or a second time: nothing may be written any more, and nothing may be run.
                self.harness.do(commands.Commit(granted.ticket, (), len(granted.page_ids)))
            else:
                self.harness.commit(req, granted, verify=verify)
                self.committed.add(granted.ticket)
        except PdserveError:
            return

    @rule(call_id=calls, offset=st.integers(0, 2))
    def cancel(self, call_id: int, offset: int) -> None:
        if (req := self.reqs.get(call_id)) is not None:
            self.end(req.key.for_completion(offset % req.n))

    @rule(call_id=calls, drained=st.booleans())
    def release(self, call_id: int, drained: bool) -> None:
        if (granted := self.granted(call_id)) is not None:
            self.harness.do(commands.Release(granted.ticket, drained=drained))

    @rule(call_id=calls)
    def loop_is_done(self, call_id: int) -> None:
        if (granted := self.granted(call_id)) is not None:
            self.harness.do(commands.Drained(granted.ticket))

    @rule(pair=st.sampled_from(PAIRS))
    def sender_gone(self, pair: str) -> None:
        self.gone.add(pair)
        self.harness.do(commands.SenderGone(pair))

    @rule(epoch=st.sampled_from(EPOCHS))
    def reopen_session(self, epoch: int) -> None:
        self.harness.do(commands.SessionClosed(epoch))
        self.silent |= {key for key in self.keys() if key.router_epoch == epoch}
        self.harness.do(commands.SessionOpened(epoch))

    @rule(seconds=st.sampled_from([0.05, LEASE.total_seconds() / 3, LEASE.total_seconds() + 1]))
    def tick(self, seconds: float) -> None:
        self.harness.tick(seconds)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.harness.run(count)

    @rule()
    def flush(self) -> None:
        self.harness.do(commands.FlushPrefixCache())

    @invariant()
    def pages_are_conserved_and_ended_keys_are_silent(self) -> None:
        self.harness.counts()
        for event in self.harness.new_events():
            for key in _keys_of(event):
                assert key not in self.silent, f"{event} for a key that has ended"
            match event:
                case events.StepTokens(tokens=tokens):
                    for token in tokens:
                        self.take(token)
                case events.Retracted(key=key):
                    self.silent.add(key)
                case events.Failed(failure=failure):
                    self.silent.add(failure.key)

    def take(self, token: Any) -> None:
        tokens = self.streamed.setdefault(token.key, [])
        assert token.index == len(tokens), "a token is lost or doubled"
        tokens.append(token.token_id)
        if token.finish is not None:
            self.silent.add(token.key)
            (req,) = [req for req in self.reqs.values() if req.uid <= token.key.uid < req.uid + req.n]
            whole = continuation(req.input_ids.tolist(), req.output_len, token.key.uid - req.uid)
            first = 0 if token.key.uid in self.local else 1  # A sender sees to what ends with the first.
            stops = [i for i, token_id in enumerate(whole) if i >= first and token_id in req.sampling_params.stop_token_ids]
            assert tokens == whole[: stops[0] + 1 if stops else None]

    def teardown(self) -> None:
        """However it went: once everybody has let go, every page is free or cached."""
        if not hasattr(self, "harness"):
            return
        for epoch in EPOCHS:
            self.harness.do(commands.SessionClosed(epoch))
        for pair in PAIRS:
            self.harness.do(commands.SenderGone(pair))
        for event in self.harness.events:
            if isinstance(event, events.TicketClosed):
                self.harness.do(commands.Drained(event.ticket))
        self.harness.run()  # What is in the air lands.
        self.harness.assert_idle()

    def granted(self, call_id: int) -> commands.Granted | None:
        reply = self.harness.reply(call_id)
        return None if reply is None or reply.error is not None else reply.value

    def keys(self) -> set[WorkKey]:
        return {req.key.for_completion(i) for req in self.reqs.values() for i in range(req.n)}

    def end(self, key: WorkKey) -> None:
        self.harness.do(commands.Cancel(key))
        self.silent.add(key)


def _keys_of(event: Any) -> list[WorkKey]:
    match event:
        case events.StepTokens(tokens=tokens):
            return [token.key for token in tokens]
        case events.Retracted(key=key):
            return [key]
        case events.Failed(failure=failure):
            return [failure.key]
        case events.PrefillStarted(key=key):
            return []  # Of the first completion, which may have been cancelled.
        case Reply() | events.Stats() | events.TicketOpened() | events.TicketClosed():
            return []
        case _:
            raise AssertionError(event)


class DecodeMachineAhead(DecodeMachine):
    """Over a runner that launches a step before the last one's tokens are read."""

    lookahead = 1


SETTINGS = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DecodeMachine.TestCase.settings = SETTINGS
DecodeMachineAhead.TestCase.settings = SETTINGS
TestAnyOrder = pytest.mark.timeout(120)(DecodeMachine.TestCase)
TestAnyOrderAhead = pytest.mark.timeout(120)(DecodeMachineAhead.TestCase)
