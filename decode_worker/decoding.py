"""Decoding: the completions that have all their KV, and the step that advances them (continuous batching)."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from common.core import Batch
from common.engine.finish import finish_reason
from common.engine.handle import Emit
from common.engine.pages import PagePool
from common.engine.runner import Runner, Sampled
from common.work import FinishReason, TokenOut
from common.work_key import WorkKey
from decode_worker import scheduler
from decode_worker.completion import Completion
from decode_worker.events import Retracted, StepTokens
from decode_worker.states import State


class Decoding:
    """Engine thread only. A completion is here from add() until it finishes, is dropped or is retracted."""

    def __init__(self, runner: Runner, pool: PagePool, *, max_running: int, emit: Emit) -> None:
        assert max_running <= runner.page_table.rows, f"{max_running} running need as many of {runner.page_table.rows} rows"
        self._runner = runner
        self._pool = pool
        self._max_running = max_running
        self._emit = emit
        self._running: list[Completion] = []
        self._committed: list[Completion] = []
        """Both in order."""
        self._by_key: dict[WorkKey, Completion] = {}
        self.is_starved = False
        """Somebody skipped the last step for want of a page."""
        self.is_stuck = False
        """So did everybody: stepping is of no use until wake()."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Completion]:
        return iter([*self._running, *self._committed])

    @property
    def num_running(self) -> int:
        return len(self._running)

    def of_key(self, key: WorkKey) -> Completion | None:
        return self._by_key.get(key)

    def add(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            self._by_key[completion.req.key] = completion
            bisect.insort(self._committed, completion, key=lambda other: other.order)

    def drop(self, completion: Completion) -> None:
        """Ends it without a word to its router."""
        del self._by_key[completion.req.key]
        if completion.state is State.RUNNING:
            self._running.remove(completion)
            self._runner.page_table.release_row(completion.req.table_idx)
        else:
            self._committed.remove(completion)
        completion.give_back(self._pool)
        if not self._by_key:
            self.is_starved = False

    def retract(self, completion: Completion) -> None:
        """Gives it back to its router, which runs it again as a new attempt."""
        self.drop(completion)
        self._emit(Retracted(completion.req.key))

    def wake(self) -> None:
        """Something changed that may have freed pages."""
        self.is_stuck = False

    def step(self) -> None:
        """One forward pass over everybody who has room for one more token."""
        step = self._plan()
        self.is_starved, self.is_stuck = bool(step.starved), not step.batch
        for completion in step.grow:
            self._grow(completion)
        for completion in step.batch:
            if completion.state is State.COMMITTED:
                self._join(completion)
        if step.batch:
            sampled = self._runner.run(Batch([completion.req for completion in step.batch], "decode"))
            self._advance_all(step.batch, [one for (one,) in sampled])

    def _plan(self) -> scheduler.Step[Completion]:
        while True:
            plan = scheduler.plan(self._running, self._committed, max_running=self._max_running, available=self._pool.available)
            if isinstance(plan, scheduler.Step):
                return plan
            self.retract(plan.victim)

    def _grow(self, completion: Completion) -> None:
        pages = self._pool.try_allocate(1)
        assert pages is not None, "the plan counts on a page that is not there"
        if completion.state is State.RUNNING:
            self._runner.page_table.assign(completion.req.table_idx, completion.num_pages, pages)
        completion.own += pages

    def _join(self, completion: Completion) -> None:
        completion.move_to(State.RUNNING)
        self._committed.remove(completion)
        bisect.insort(self._running, completion, key=lambda other: other.order)
        completion.req.table_idx = self._runner.page_table.take_row()
        self._runner.page_table.assign(completion.req.table_idx, 0, completion.pages)

    def _advance_all(self, batch: list[Completion], sampled: list[Sampled]) -> None:
        by_router: defaultdict[int, list[TokenOut]] = defaultdict(list)
        for completion, one in zip(batch, sampled, strict=True):
            tokens = by_router[completion.req.router_epoch]
            if completion.repeat is not None:
                tokens.append(completion.repeat)
                completion.repeat = None
            tokens.append(self._advance(completion, one))
        for router_epoch, tokens in by_router.items():
            self._emit(StepTokens(router_epoch, tuple(tokens)))

    def _advance(self, completion: Completion, one: Sampled) -> TokenOut:
        """Takes the sampled token in, and ends the completion if that was its last."""
        req, index = completion.req, completion.req.num_output
        req.complete_one()
        req.append_host(torch.tensor([one.token_id], dtype=torch.int32))
        finish: FinishReason | None = finish_reason(req, one.token_id, self._runner.eos_token_ids)
        if finish is not None:
            self.drop(completion)
        return TokenOut(req.key, index, one.token_id, one.logprob, one.top, finish)
