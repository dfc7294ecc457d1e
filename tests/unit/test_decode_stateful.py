"""The decode core under random orders of everything: pages are conserved, an ended key is silent, tokens are right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from common.core import Req
from common.engine.handle import Reply
from common.errors import PdserveError
from common.handoff.base import SENDER_WRITES, TRANSPORTS
from common.work_key import WorkKey
from decode_worker import commands, events
from tests.helpers.decode_core import EPOCH, LEASE, Harness, make_req
from tests.helpers.fake_runner import continuation

EPOCHS = (EPOCH, EPOCH + 1)
PAIRS = ("pair-0", "pair-1")


class DecodeMachine(RuleBasedStateMachine):
    """Model: which keys have ended for their router, and which granted tickets are not yet committed, ended or drained."""

    calls = Bundle("calls")

    @initialize(pages=st.integers(6, 24), page_size=st.sampled_from([1, 2, 4]), max_running=st.integers(1, 4))
    def start(self, pages: int, page_size: int, max_running: int) -> None:
        self.harness = Harness(pages=pages, page_size=page_size, max_running=max_running, max_context=64)
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
    )
    def reserve(
        self, prompt: list[int], output_len: int, n: int, transport: Any, epoch: int, pair: str, priority: int, verify: bool
    ) -> int:
        req = make_req(prompt, uid=self.next_uid, output_len=output_len, n=n, epoch=epoch, priority=priority)
        self.next_uid += n
        if pair in self.gone and transport in SENDER_WRITES:
            return -1  # The event loop refuses it (decode_worker/pairs.py).
        try:
            call_id = self.harness.reserve(req, transport=transport, pair_id=pair, verify=verify)
        except PdserveError:
            return -1
        self.reqs[call_id] = req
        return call_id

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
            assert tokens == continuation(req.input_ids.tolist(), req.output_len, token.key.uid - req.uid)

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
        case Reply() | events.Stats() | events.TicketOpened() | events.TicketClosed():
            return []
        case _:
            raise AssertionError(event)


DecodeMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrder = pytest.mark.timeout(120)(DecodeMachine.TestCase)
