"""A DecodeCore over the fake runner, driven by hand: a manual clock, the roles of router and prefill worker as plain calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from common.core import Req, SamplingParams
from common.engine.handle import Reply
from common.handoff.base import Transport, page_checksum, tokens_of
from common.work import FinishReason, TokenOut
from common.work_key import WorkKey
from decode_worker import commands, events
from decode_worker.core import DecodeCore
from decode_worker.local_prefill import PromptLimits
from tests.helpers.fake_runner import FakeRunner, next_token

EPOCH = 7
LEASE = timedelta(seconds=10)
PROMPT = list(range(10, 20))
"""Two whole pages of 4 and half a third."""


def make_req(
    ids: Sequence[int],
    *,
    uid: int = 1,
    attempt: int = 1,
    output_len: int = 4,
    n: int = 1,
    prompt_len: int = -1,
    priority: int = 0,
    epoch: int = EPOCH,
    completion: int = 0,
    logprobs: int | None = None,
    sampling: SamplingParams | None = None,
) -> Req:
    """As a prefill worker would send it."""
    return Req(
        input_ids=torch.tensor(list(ids), dtype=torch.int32),
        table_idx=-1,
        cached_len=0,
        output_len=output_len,
        uid=uid,
        sampling_params=sampling or SamplingParams(max_tokens=output_len, seed=1),
        cache_handle=None,
        prompt_len=prompt_len,
        router_epoch=epoch,
        attempt=attempt,
        completion=completion,
        n=n,
        priority=priority,
        logprobs=logprobs,
    )


def fill(pool: Any, req: Req, page_ids: Sequence[int], prefix_len: int) -> None:
    """Writes what FakeRunner would have computed for tokens prefix_len and on into a ticket's pages."""
    size = pool.page_size
    for index, page in enumerate(page_ids):
        for position in tokens_of(index, input_len=len(req.input_ids), prefix_len=prefix_len, page_size=size):
            pool.k(0)[page, position % size, 0, 0] = float(req.input_ids[position] + 1)
            pool.v(0)[page, position % size, 0, 0] = float(position + 1)


def first_tokens(req: Req, *, finish: Sequence[FinishReason | None] = ()) -> tuple[TokenOut, ...]:
    """What the prefill worker samples after the input, per completion."""
    ends = list(finish) or [None] * req.n
    ids = req.input_ids.tolist()
    return tuple(
        TokenOut(req.key.for_completion(i), req.num_output, next_token(ids, req.completion + i), finish=ends[i])
        for i in range(req.n)
    )


@dataclass
class Harness:
    """router and prefill worker of one decode core."""

    pages: int = 32
    page_size: int = 4
    max_running: int = 8
    max_context: int = 128
    lookahead: int | None = None
    local_prefill: PromptLimits | None = None
    runner: FakeRunner = field(init=False)
    core: DecodeCore = field(init=False)

    def __post_init__(self) -> None:
        self.now = 100.0
        self.events: list[Any] = []
        self.taken = 0
        self._calls = 0
        self._names = 0
        self.runner = FakeRunner(
            num_pages=self.pages,
            page_size=self.page_size,
            rows=self.max_running,
            max_context=self.max_context,
            lookahead=self.lookahead,
        )
        self.core = DecodeCore(
            self.runner,
            pool_pages=self.pages,
            max_running=self.max_running,
            lease=LEASE,
            emit=self.events.append,
            local_prefill=self.local_prefill,
            clock=lambda: self.now,
            new_ticket=self._new_name,
        )
        self.do(commands.SessionOpened(EPOCH))

    def _new_name(self) -> str:
        self._names += 1
        return f"ticket-{self._names}"

    def do(self, command: Any) -> Any:
        return self.core.handle(command, None)

    def reserve(self, req: Req, *, transport: Transport = "shm", pair_id: str = "pair", verify: bool = False) -> int:
        """The call's id; granted() tells how it went. Raises what the core refuses it with."""
        self._calls += 1
        self.core.handle(commands.Reserve(req, pair_id, transport, verify), self._calls)
        return self._calls

    def prefill(self, req: Req, *, deadline: float = math.inf) -> WorkKey:
        """What a router says to a worker that computes prompts itself."""
        self.do(commands.Prefill(req, deadline))
        return req.key

    def reply(self, call_id: int) -> Reply | None:
        return next((event for event in self.events if isinstance(event, Reply) and event.call_id == call_id), None)

    def granted(self, call_id: int) -> commands.Granted:
        reply = self.reply(call_id)
        assert reply is not None, "not granted yet"
        assert reply.error is None, reply.error
        granted: commands.Granted = reply.value
        return granted

    def commit(
        self, req: Req, granted: commands.Granted, *, finish: Sequence[FinishReason | None] = (), verify: bool = False
    ) -> None:
        """The prefill worker's part after a grant: all pages filled, first tokens sampled."""
        fill(self.runner.pool, req, granted.page_ids, granted.prefix_len)
        crcs = tuple(self._checksums(req, granted)) if verify else ()
        self.do(commands.Commit(granted.ticket, first_tokens(req, finish=finish), len(granted.page_ids), crcs))

    def _checksums(self, req: Req, granted: commands.Granted) -> Iterator[int]:
        pool, ticket = self.runner.pool, self.core._tickets.reservations.receiving(granted.ticket)
        only_tokens = ticket is not None and ticket.transport == "cuda_ipc"
        for index, page in enumerate(granted.page_ids):
            tokens = tokens_of(index, input_len=len(req.input_ids), prefix_len=granted.prefix_len, page_size=pool.page_size)
            yield page_checksum(pool.read_page(page, tokens=len(tokens) if only_tokens else pool.page_size))

    def admit(self, req: Req, **reserve: Any) -> None:
        """Reserve to Commit of a request that is granted at once."""
        self.commit(req, self.granted(self.reserve(req, **reserve)))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.core.tick(self.now)

    def step(self) -> None:
        assert self.core.has_work()
        self.core.step()

    def step_and_land(self) -> None:
        """Steps until what the first of them launched has landed."""
        for _ in range(1 + self.runner.lookahead):
            self.step()

    def run(self, steps: int = 1000) -> None:
        """Steps while there is work."""
        for _ in range(steps):
            if not self.core.has_work():
                return
            self.core.step()

    def new_events(self) -> list[Any]:
        """What was emitted since the last call, in order."""
        fresh, self.taken = self.events[self.taken :], len(self.events)
        return fresh

    def told(self, kind: type[Any]) -> list[Any]:
        """All events of that kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def tokens(self, key: WorkKey) -> list[TokenOut]:
        """All tokens emitted for a key, the repeated first included."""
        return [token for step in self.told(events.StepTokens) for token in step.tokens if token.key == key]

    def ids(self, key: WorkKey) -> list[int]:
        """Of all its tokens, which come in order."""
        tokens = self.tokens(key)
        assert [token.index for token in tokens] == list(range(len(tokens))), "a token is lost or comes twice"
        return [token.token_id for token in tokens]

    def counts(self) -> Any:
        return self.do(commands.Check())

    def assert_idle(self) -> None:
        counts = self.counts()
        assert (counts.held, counts.quarantined) == (0, 0), counts
        assert self.runner.page_table.num_free == self.runner.page_table.rows
        assert not self.core.has_work()


def colocated(*, chunk_tokens: int = 4, max_prompts: int = 100, **shape: Any) -> Harness:
    """Of a core that computes prompts itself."""
    return Harness(local_prefill=PromptLimits(chunk_tokens, max_prompts), **shape)
