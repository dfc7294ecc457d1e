"""One attempt at a request, and what all its attempts share."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from functools import cached_property

from common.core import SamplingParams
from common.engine.pages import pages_for
from common.errors import DeadlineExceeded
from common.rpc.gen.pdserve.v1 import prefill_pb2
from common.tracing import NO_SPAN
from common.wire import ids_to_bytes, req_pb
from common.work_key import WorkKey
from router.completion import Completion, Stage
from router.fleet.placement import Ask, Pair
from router.fleet.prompt_blocks import PromptBlocks
from router.fleet.workers import Worker
from router.stake import Stake
from router.traces import UNTRACED, AttemptTrace, RequestTrace


@dataclass(frozen=True)
class Work:
    """What all attempts at a request share. output_limit: tokens per completion. deadline: time.monotonic() seconds.
    session, tenant: as the caller names them; "" for none."""

    router_epoch: int
    request_id: str
    prompt: array[int]
    sampling: SamplingParams
    output_limit: int
    logprobs: int | None
    priority: int
    page_size: int
    deadline: float | None
    session: str = ""
    tenant: str = ""
    trace: RequestTrace = UNTRACED

    @cached_property
    def blocks(self) -> PromptBlocks:
        return PromptBlocks(self.prompt)

    @property
    def pages(self) -> int:
        return pages_for(len(self.prompt) + self.output_limit, self.page_size)

    @property
    def needs_decode(self) -> bool:
        return self.output_limit > 1

    def ask(self, *, avoid: frozenset[str]) -> Ask:
        return Ask(self.pages, needs_decode=self.needs_decode, avoid=avoid, prompt=self.blocks, session=self.session)

    def deadline_ms(self) -> int:
        """What is left, 0 for no deadline. Raises DeadlineExceeded."""
        if self.deadline is None:
            return 0
        if (left := self.deadline - time.monotonic()) <= 0:
            raise DeadlineExceeded("the deadline passed before the request was placed")
        return max(1, min(int(left * 1000), 2**32 - 1))


@dataclass(frozen=True, eq=False)
class Attempt:
    """One submission. members: the completions it was for, in order of uid. stake: what it adds to its workers' loads.
    trace: its span."""

    number: int
    pair: Pair
    members: tuple[Completion, ...]
    stake: Stake
    trace: AttemptTrace = field(default_factory=lambda: AttemptTrace(NO_SPAN, 1))

    def is_on(self, worker: Worker, stage: Stage) -> bool:
        """Whether the worker has a part in it for a completion in this stage."""
        return (stage is Stage.PREFILL and worker in self.pair) or (stage is Stage.DECODE and worker is self.pair.decode)

    def message(self, work: Work, deadline_ms: int) -> prefill_pb2.Submit:
        """What its prefill worker is told."""
        first = self.members[0]
        req = req_pb(
            key=WorkKey(work.router_epoch, first.uid, self.number),
            input_ids=ids_to_bytes(work.prompt) + ids_to_bytes(first.token_ids),
            prompt_len=len(work.prompt),
            output_len=work.output_limit - len(first.token_ids),
            sampling=work.sampling,
            completion=first.number,
            n=len(self.members),
            logprobs=work.logprobs,
            priority=work.priority,
            request_id=work.request_id,
            traceparent=self.trace.traceparent,
        )
        req.deadline_ms = deadline_ms
        if self.pair.decode is None or self.pair.is_alone:
            return prefill_pb2.Submit(req=req)
        decode = self.pair.decode
        return prefill_pb2.Submit(req=req, decode_address=decode.profile.address, decode_worker=decode.id)
