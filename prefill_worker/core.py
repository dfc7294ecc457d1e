"""PrefillCore: what the prefill engine's thread runs. A state machine over a Runner, the page pool and the requests.

1. Queued      Admit: waits in order until it is first and there are pages, a row and a place (max_running) for it.
2. Reserving   Admitted: holds them while the event loop reserves pages at the decode worker.
3. Computing   Compute: each step launches chunks of several requests and lands an earlier step's (runner.lookahead); complete
               pages go on their way when their chunk has landed.
4. Committing  PrefillDone: first tokens made; keeps its pages because they may still be read.
5. Done        Forget, from any state: whole pages become prefix cache, the rest is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.engine.first_tokens import take_first_tokens
from common.engine.flights import Flights
from common.engine.handle import DEFERRED, Emit, EngineDescription, Reply
from common.engine.pages import PagePool
from common.engine.prefilling import Prefilling
from common.engine.runner import Runner, Sampled
from common.errors import AlreadyExists, PdserveError, Unavailable
from common.handoff.base import pages_ready
from common.work import PageCounts
from common.work_key import WorkKey
from prefill_worker.commands import Admit, Admitted, Check, Compute, Extend, FlushPrefixCache, Forget, ForOutlets
from prefill_worker.events import Broken, PrefillDone, PrefillStarted, Stats
from prefill_worker.holdings import Holdings
from prefill_worker.job import Job
from prefill_worker.outlets import Outlets
from prefill_worker.slots import Slots
from prefill_worker.states import State
from prefill_worker.waiting import Waiting

if TYPE_CHECKING:
    from common.handoff.staging import Staging
    from prefill_worker.cuda_tools import CudaTools


class PrefillCore:
    """An EngineCore (common/engine/handle.py). Engine thread only."""

    def __init__(
        self,
        runner: Runner,
        *,
        emit: Emit,
        max_running: int,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        staging: Staging | None = None,
        cuda: CudaTools | None = None,
    ) -> None:
        """max_running: requests that hold pages at once. chunk_tokens: budget of one step, over all requests. staging: how pages
        get to where the event loop can read them, if it cannot in the pool. cuda: for storing into decode workers' GPUs."""
        page_size = runner.compatibility.page_size
        self._runner = runner
        self._emit = emit
        self._max_running = max_running
        self._clock = clock
        self._page_size = page_size
        self._pool = PagePool(runner.pool.num_pages, page_size)
        self._holdings = Holdings(
            self._pool, runner.page_table, total_pages=runner.pool.num_pages, max_context=runner.compatibility.max_context
        )
        slots = None if staging is None else Slots(staging, emit)
        self._outlets = Outlets(runner.pool, emit=emit, clock=clock, slots=slots, cuda=cuda)
        self._flights = Flights(lookahead=runner.lookahead)
        self._prefilling: Prefilling[Job] = Prefilling(
            runner,
            flights=self._flights,
            chunk_tokens=chunk_tokens,
            on_start=lambda job: emit(PrefillStarted(job.key, cached_tokens=job.cached_tokens)),
            on_landed=self._advance,
            stores=self._outlets.peer_stores,
        )
        self._jobs: dict[WorkKey, Job] = {}
        self._waiting = Waiting()
        self._arrivals = 0
        self._stats: Stats | None = None

    @property
    def description(self) -> EngineDescription:
        pool = self._runner.pool
        return EngineDescription(self._runner.compatibility, pool.num_pages, pool.page_bytes)

    def handle(self, command: Any, call_id: int | None) -> Any:
        match command:
            case Admit():
                return self._admit(command, call_id)
            case Compute():
                self._start(command)
            case Extend():
                for key, deadline in command.deadlines.items():
                    if key in self._jobs:
                        self._jobs[key].deadline = deadline
            case Forget():
                self._forget(command.key)
            case ForOutlets():
                return self._outlets.handle(command, call_id)
            case FlushPrefixCache():
                return self._pool.flush()
            case Check():
                return self._check()
            case _:
                raise TypeError(f"unknown command {command!r}")
        return None

    def abandon(self, call_id: int) -> None:
        """Whoever asked for an Admit has gone, so the request goes too."""
        if self._outlets.abandon(call_id):
            return
        key = next((key for key, job in self._jobs.items() if job.call_id == call_id), None)
        if key is not None:
            self._forget(key)

    def has_work(self) -> bool:
        return len(self._flights) > 0 or any(job.is_computing for job in self._jobs.values())

    def step(self) -> None:
        """Launches one forward pass over the chunks that fit the budget, and sends on the pages that land meanwhile."""
        for job in self._computing():
            self._deliver(job)  # What the prefix cache holds and the decode worker lacks: produced by no layer, so sent first.
        self._flights.land_due(launched=self._prefilling.launch(self._computing()))

    def tick(self, now: float) -> None:
        self._outlets.tick()
        for job in self._computing():
            self._check_lease(job, now)
        stats = self._take_stats()
        if stats == self._stats:
            return
        if not self._jobs:
            self._holdings.check(idle=True)
        self._stats = stats
        self._emit(stats)

    def close(self) -> None:
        for key in list(self._jobs):
            self._forget(key)
        self._outlets.close_all()

    def _admit(self, command: Admit, call_id: int | None) -> Any:
        req = command.req
        self._holdings.check_fits(len(req.input_ids))
        if req.key in self._jobs:
            raise AlreadyExists(f"request {req.key} is being worked on")
        job = Job(req, arrival=self._arrivals, call_id=call_id)
        self._arrivals += 1
        self._jobs[req.key] = job
        self._waiting.add(job)
        self._admit_waiting()
        return DEFERRED

    def _admit_waiting(self) -> None:
        """Gives pages to those whose turn it is. Called whenever something was added or given back."""
        while (job := self._waiting.first()) is not None:
            if len(self._jobs) - len(self._waiting) >= self._max_running or not self._holdings.try_take(job):
                return
            self._waiting.remove(job)
            job.move_to(State.RESERVING)
            if job.call_id is not None:
                self._emit(Reply(job.call_id, Admitted(job.req.cached_len)))

    def _start(self, command: Compute) -> None:
        job = self._jobs.get(command.key)
        if job is None:
            return
        job.destination = command.destination
        if command.destination is not None:
            job.deadline = command.destination.deadline
        job.move_to(State.COMPUTING)

    def _forget(self, key: WorkKey) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if job.state is State.QUEUED:
            self._waiting.remove(job)
        if job.in_flight:
            job.is_broken = True  # What lands now is of no use to it.
            self._flights.land_all()
        self._outlets.settle(job)
        job.move_to(State.DONE)
        self._outlets.forget(job)
        self._holdings.give_back(job)
        self._admit_waiting()

    def _computing(self) -> list[Job]:
        """In order of arrival."""
        return sorted((job for job in self._jobs.values() if job.is_computing), key=lambda job: job.arrival)

    def _advance(self, job: Job, sampled: list[Sampled]) -> None:
        """A chunk of this job has landed."""
        if not sampled:
            self._deliver(job)
            return
        tokens = take_first_tokens(job.req, sampled, self._runner.eos_token_ids, cached_tokens=job.cached_tokens)
        if self._deliver(job):
            job.move_to(State.COMMITTING)
            # In this order: the event loop knows of the Commit before the decode worker can have acted on it.
            self._emit(PrefillDone(job.key, tokens, job.sent, tuple(job.page_crc32)))
            self._outlets.commit(job, tokens)

    def _deliver(self, job: Job) -> bool:
        """Sends on what is complete and not sent yet; False if the job broke over it."""
        if job.destination is None:
            return True
        if not self._check_lease(job, self._clock()):
            return False
        prefix_len = job.destination.prefix_len
        ready = pages_ready(job.computed_len, input_len=job.input_len, prefix_len=prefix_len, page_size=self._page_size)
        try:
            self._outlets.put(job, job.take_ready(ready, page_size=self._page_size))
        except PdserveError as error:
            self._break(job, error)
            return False
        return True

    def _check_lease(self, job: Job, now: float) -> bool:
        if now < job.deadline:
            return True
        self._break(job, Unavailable("the decode worker's lease ran out during prefill"))
        return False

    def _break(self, job: Job, error: PdserveError) -> None:
        job.is_broken = True
        self._emit(Broken(job.key, error))

    def _check(self) -> PageCounts:
        self._holdings.check(idle=not self._jobs)
        self._outlets.check()
        return self._pool.counts()

    def _take_stats(self) -> Stats:
        states = [job.state for job in self._jobs.values()]
        return Stats(
            running=sum(state in (State.COMPUTING, State.COMMITTING) for state in states),
            waiting=sum(state in (State.QUEUED, State.RESERVING) for state in states),
            queued_tokens=sum(job.remaining for job in self._jobs.values()),
            computed_tokens=self._prefilling.computed_tokens,
            pages=self._pool.counts(),
        )
