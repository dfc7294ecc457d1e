"""Decoding: the completions that have all their KV, and the steps that advance them (continuous batching).

A step is launched and, up to runner.lookahead steps later, lands. Launching moves the lengths on and gives out pages; landing
appends the tokens, says them and finds out who has finished. Who ended in between is LEAVING until its last step has landed.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

from common.core import Batch
from common.engine.finish import finish_reason
from common.engine.flights import Flights
from common.engine.handle import Emit
from common.engine.pages import PagePool
from common.engine.runner import Runner, Sampled
from common.work import TokenOut
from common.work_key import WorkKey
from decode_worker import scheduler
from decode_worker.completion import Completion
from decode_worker.events import Retracted, StepTokens
from decode_worker.states import State


class Decoding:
    """Engine thread only. A completion is here from add() until it finishes, is dropped or is retracted."""

    def __init__(self, runner: Runner, pool: PagePool, *, flights: Flights, max_running: int, emit: Emit) -> None:
        """flights: the engine's, in which others may have steps too."""
        assert max_running <= runner.page_table.rows, f"{max_running} running need as many of {runner.page_table.rows} rows"
        self._runner = runner
        self._pool = pool
        self._flights = flights
        self._max_running = max_running
        self._emit = emit
        self._running: list[Completion] = []
        self._committed: list[Completion] = []
        """Both in order."""
        self._by_key: dict[WorkKey, Completion] = {}
        self._num_leaving = 0
        self.is_starved = False
        """Somebody skipped the last step for want of a page."""
        self.is_stuck = False
        """So did everybody, and nothing is in the air: stepping is of no use until wake()."""

    def __len__(self) -> int:
        """Those that are leaving not counted: their routers are done with them."""
        return len(self._by_key)

    def __iter__(self) -> Iterator[Completion]:
        return iter([*self._running, *self._committed])

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_by_state(self) -> tuple[int, int, int]:
        """COMMITTED, RUNNING and LEAVING."""
        return len(self._committed), len(self._running), self._num_leaving

    def of_key(self, key: WorkKey) -> Completion | None:
        return self._by_key.get(key)

    def add(self, completions: Iterable[Completion]) -> None:
        self.wake()
        for completion in completions:
            self._by_key[completion.req.key] = completion
            bisect.insort(self._committed, completion, key=lambda other: other.precedence)

    def drop(self, completion: Completion) -> None:
        """Ends it without a word to its router. What is in the air for it lands unread."""
        del self._by_key[completion.req.key]
        (self._running if completion.state is State.RUNNING else self._committed).remove(completion)
        if completion.in_flight:
            # Its pages stay its own: the step in the air stores into them, and other GPUs do not wait for this one's queue.
            completion.move_to(State.LEAVING)
            self._num_leaving += 1
        else:
            self._give_back(completion)
        if not self._by_key:
            self.is_starved = False

    def close_session(self, router_epoch: int) -> None:
        """Drops all of that router's."""
        for completion in self:
            if completion.req.router_epoch == router_epoch:
                self.drop(completion)

    def retract(self, completion: Completion) -> None:
        """Gives it back to its router, which runs it again as a new attempt."""
        self.drop(completion)
        self._emit(Retracted(completion.req.key))

    def wake(self) -> None:
        """Something changed that may have freed pages."""
        self.is_stuck = False

    def launch(self) -> bool:
        """Launches one forward pass over everybody who has room for one more token; False if there is nobody."""
        step = self._plan()
        self.is_starved, self.is_stuck = bool(step.starved), not step.batch and not self._flights
        for completion in step.grow:
            self._grow(completion)
        for completion in step.batch:
            if completion.state is State.COMMITTED:
                self._join(completion)
        if not step.batch:
            return False
        pending = self._runner.launch(Batch([completion.req for completion in step.batch], "decode"))
        for completion in step.batch:
            completion.req.complete_one()
            completion.in_flight += 1
        self._flights.add(pending, partial(self._land, step.batch))
        return True

    def _plan(self) -> scheduler.Step[Completion]:
        while True:
            # Those whose last token is in the air neither step nor need a page.
            running = [completion for completion in self._running if completion.req.can_decode]
            places = min(self._max_running - len(self._running), self._runner.page_table.num_free)
            plan = scheduler.plan(running, self._committed, places=places, available=self._pool.available)
            if isinstance(plan, scheduler.Step):
                return plan
            if self._flights:
                self._flights.land_all()  # Who turns out to have finished may have pages enough.
            else:
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
        bisect.insort(self._running, completion, key=lambda other: other.precedence)
        completion.req.table_idx = self._runner.page_table.take_row()
        self._runner.page_table.assign(completion.req.table_idx, 0, completion.pages)

    def _land(self, batch: list[Completion], results: list[list[Sampled]]) -> None:
        by_router: defaultdict[int, list[TokenOut]] = defaultdict(list)
        for completion, (one,) in zip(batch, results, strict=True):
            completion.in_flight -= 1
            if completion.state is State.RUNNING:
                by_router[completion.req.router_epoch] += self._take(completion, one)
            elif completion.in_flight == 0:
                self._num_leaving -= 1
                self._give_back(completion)
        for router_epoch, tokens in by_router.items():
            self._emit(StepTokens(router_epoch, tuple(tokens)))

    def _take(self, completion: Completion, one: Sampled) -> list[TokenOut]:
        """Takes the sampled token in, and ends the completion if that was its last. What its router is to be told."""
        req, index = completion.req, completion.req.num_output
        req.append_id(one.token_id)
        finish = finish_reason(req, one.token_id, self._runner.eos_token_ids)
        repeated = [] if completion.repeat is None else [completion.repeat]
        completion.repeat = None
        if finish is not None:
            self.drop(completion)
        return [*repeated, TokenOut(req.key, index, one.token_id, one.logprob, one.top, finish)]

    def _give_back(self, completion: Completion) -> None:
        if completion.req.table_idx >= 0:
            self._runner.page_table.release_row(completion.req.table_idx)
        completion.give_back(self._pool)
