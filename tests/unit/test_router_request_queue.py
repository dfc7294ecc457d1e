"""The queue in the event loop: who goes at once, who waits for what, and how waiting ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from common.errors import ResourceExhausted, Unavailable
from common.work import WorkerLoad
from router.fleet.placement import Ask
from router.fleet.policies import Placer
from router.fleet.roster import Roster
from router.fleet.workers import Worker
from router.queueing import request_queue
from router.queueing.answers import Answer
from router.queueing.request_queue import LOOKAHEAD, RequestQueue
from router.queueing.room import RoomRule
from tests.helpers.eventually import eventually
from tests.helpers.waiters import waiter
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Workers:
    """A fleet, its registry and its listeners in one."""

    def __init__(self, *workers: Worker) -> None:
        self.live = list(workers)
        self.registry = self
        self.placer = Placer("least_load", seed=1)
        self._changed = asyncio.Event()
        self.given_up = asyncio.Event()
        self.asked: list[bool] = []
        """Whether each that waits for a worker to come was there before."""

    def listen(self, listener: Any) -> None:
        self._listener = listener

    def join(self, made: Worker) -> None:
        self.live.append(made)
        self._changed.set()
        self._listener.changed()

    @property
    def computing(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.live if worker.is_placeable and worker.computes_prompts)

    @property
    def is_idle(self) -> bool:
        return not any(worker.requests or worker.queued_tokens for worker in self.live)

    @property
    def has_places(self) -> bool:
        return any(worker.has_place for worker in self.live if worker.role == "decode")

    @property
    def roster(self) -> Roster:
        return Roster(self.live)

    async def until_placeable(self, ask: Ask, *, is_begun: bool = False) -> None:
        self.asked.append(is_begun)
        while self.roster.seats(ask) is None:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._changed, self.given_up)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self.given_up.is_set():
                raise Unavailable("no pair")


def queue_of(workers: Workers, *, clock: Callable[[], float] | None = None, longest_wait: float = 60) -> RequestQueue:
    fleet: Any = workers
    return RequestQueue(fleet, rule=RoomRule(100), longest_wait=timedelta(seconds=longest_wait), clock=clock or Clock())


async def test_with_room_a_request_goes_before_enter_returns() -> None:
    queue = queue_of(Workers(worker("p", "prefill"), worker("d", "decode")))
    made, fate = waiter()
    queue.enter(made)
    assert fate.went is not None and len(queue) == 0 and made.timer is None


async def test_without_room_it_waits_until_something_was_freed() -> None:
    p = worker("p", "prefill")
    queue = queue_of(Workers(p, worker("d", "decode")))
    part = p.tokens.begin(100)
    made, fate = waiter()
    queue.enter(made)
    assert fate.went is None and len(queue) == 1
    part.end()
    queue.freed(100)
    await asyncio.sleep(0)
    assert fate.went is not None and made.timer is None


async def test_a_report_makes_room_too() -> None:
    p = worker("p", "prefill", queued_tokens=100)
    queue = queue_of(Workers(p, worker("d", "decode")))
    made, fate = waiter()
    queue.enter(made)
    p.report(WorkerLoad(queued_tokens=99))
    queue.reported()
    await asyncio.sleep(0)
    assert fate.went is not None


async def test_whoever_leaves_lets_the_next_one_go() -> None:
    p = worker("p", "prefill", queued_tokens=100)
    queue = queue_of(Workers(p, worker("d", "decode")))
    (first, gone), (second, fate) = waiter(), waiter()
    queue.enter(first)
    queue.enter(second)
    queue.leave(first)
    queue.leave(first)
    p.report(WorkerLoad())
    queue.reported()
    await asyncio.sleep(0)
    assert fate.went is not None and (gone.went, gone.error) == (None, None)


async def test_who_was_in_line_when_the_last_worker_fell_silent_waits_for_it_like_those_that_have_begun() -> None:
    p = worker("p", "prefill", queued_tokens=100)
    workers = Workers(p, worker("d", "decode"))
    queue = queue_of(workers)
    (there, fate), (late, _) = waiter(), waiter()
    queue.enter(there)
    p.has_session = False
    queue.changed()
    queue.enter(late)
    await asyncio.sleep(0)
    assert workers.asked == [True, False]
    p.has_session = True
    p.report(WorkerLoad())
    workers.join(worker("e", "decode"))
    await asyncio.sleep(0)
    assert fate.went is not None and there.search is None


async def test_a_worker_that_failed_it_is_taken_again_once_no_other_has_had_room_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_queue, "AVOID_SECONDS", 0.01)
    full = worker("p", "prefill", queued_tokens=100)
    queue = queue_of(Workers(full, worker("q", "prefill"), worker("d", "decode")))
    (made, fate), (gone, _) = (waiter(is_begun=True, ask=Ask(1, avoid=frozenset({"q"}))) for _ in range(2))
    queue.enter(made)
    queue.enter(gone)
    assert fate.went is None
    queue.leave(gone)
    await eventually(lambda: fate.went is not None and fate.went.prefill.id == "q", within=1)
    assert gone.pardon is None and len(queue) == 0


async def test_without_a_pair_it_waits_as_long_as_the_fleet_says() -> None:
    workers = Workers(worker("p", "prefill"))
    queue = queue_of(workers)
    (made, fate), (single, alone) = waiter(), waiter(ask=Ask(1, needs_decode=False))
    queue.enter(made)
    queue.enter(single)
    assert alone.went is not None, "it is no reason for others to wait"
    await asyncio.sleep(0)
    workers.given_up.set()
    await eventually(lambda: fate.error is not None, within=1)
    assert isinstance(fate.error, Unavailable) and len(queue) == 0 and made.search is None


async def test_however_many_wait_for_a_worker_to_come_they_hold_up_nobody_else() -> None:
    workers = Workers(worker("p", "prefill"), worker("d", "decode"))
    queue = queue_of(workers)
    large = [waiter(pool=101) for _ in range(2 * LOOKAHEAD)]
    for made, _ in large:
        queue.enter(made)
    small, fate = waiter()
    queue.enter(small)
    assert fate.went is not None and len(queue) == 2 * LOOKAHEAD

    for larger in (worker("p2", "prefill", pages=200), worker("d2", "decode", pages=200)):
        workers.join(larger)
    late, later = waiter(pool=101)
    queue.enter(late)
    assert later.went is not None and all(fate.went is not None for _, fate in large[:LOOKAHEAD]), "in order, once it is there"
    for made, _ in large:
        queue.leave(made)
    await asyncio.sleep(0)


async def test_a_worker_that_comes_in_time_takes_it() -> None:
    workers = Workers(worker("p", "prefill"))
    queue = queue_of(workers)
    made, fate = waiter()
    queue.enter(made)
    await asyncio.sleep(0)
    workers.join(worker("d", "decode"))
    await eventually(lambda: fate.went is not None, within=1)
    assert made.search is None


async def test_when_the_last_worker_goes_those_in_line_begin_to_look_for_another() -> None:
    p = worker("p", "prefill", queued_tokens=100)
    workers = Workers(p, worker("d", "decode"))
    queue = queue_of(workers)
    made, fate = waiter()
    queue.enter(made)
    assert made.search is None
    p.has_session = False
    queue.changed()
    assert made.search is not None
    workers.given_up.set()
    await eventually(lambda: fate.error is not None, within=1)


async def test_nobody_waits_longer_than_the_limit() -> None:
    queue = queue_of(Workers(worker("p", "prefill", queued_tokens=100), worker("d", "decode")), longest_wait=0.02)
    made, fate = waiter()
    queue.enter(made)
    await eventually(lambda: fate.error is not None, within=1)
    assert isinstance(fate.error, ResourceExhausted) and "--queue-wait" in str(fate.error) and fate.error.retry_after


async def test_a_full_queue_refuses_the_one_with_the_least_right_to_wait() -> None:
    queue = queue_of(Workers(worker("p", "prefill", queued_tokens=100), worker("d", "decode")))
    fates = []
    for _ in range(2):
        made, fate = waiter(tenant="a")
        queue.enter(made)
        fates.append(fate)
    full = ResourceExhausted("full")
    assert not queue.displace(0, "a", full)
    assert queue.displace(0, "b", full) and [fate.error for fate in fates] == [None, full]
    assert not queue.displace(0, "b", full)


async def test_a_request_that_cannot_meet_its_deadline_is_refused_once_the_pace_is_known() -> None:
    clock = Clock()
    p = worker("p", "prefill")
    p.report(WorkerLoad(waiting=19, queued_tokens=1000))
    queue = queue_of(Workers(p, worker("d", "decode")), clock=clock)
    unknown, waits = waiter(1000, deadline=5.0)
    queue.enter(unknown)
    assert waits.error is None, "nothing was measured yet"
    clock.now = 2.0
    for _ in range(4):
        queue.freed(100)  # 2 prompts, 200 tokens a second.
    late, refused = waiter(10, deadline=14.0)
    queue.enter(late)
    assert isinstance(refused.error, ResourceExhausted) and "expected in 10.0 s" in str(refused.error)
    assert queue.retry_after() == timedelta(seconds=10)
    again, kept = waiter(10, deadline=14.0, is_begun=True)
    queue.enter(again)
    assert kept.error is None, "what has begun is not given up on a guess"
    soon, short = waiter(10, deadline=2.5)
    queue.enter(soon)
    assert short.error is None
    (urgent, first) = waiter(10, deadline=9.0, priority=1)
    queue.enter(urgent)
    assert first.error is None, "only what goes before it counts"
    queue.answered(Answer(tokens=11, handoff_seconds=0.0, place_seconds=0.5, rest_seconds=4.5))
    (talkative, second) = waiter(10, deadline=9.0, priority=1, output_tokens=20)
    queue.enter(talkative)
    assert second.error is not None, "and its answer, which will take as long as others took"
    for made in (unknown, again, soon, urgent):
        queue.leave(made)


async def test_whose_turn_comes_too_late_is_refused_and_the_next_one_goes() -> None:
    clock = Clock()
    p = worker("p", "prefill", queued_tokens=100)
    queue = queue_of(Workers(p, worker("d", "decode")), clock=clock)
    queue.answered(Answer(tokens=11, handoff_seconds=0.0, place_seconds=0.5, rest_seconds=4.5))
    (late, refused), (begun, goes), (other, goes_too) = (
        waiter(deadline=7.0, output_tokens=20),
        waiter(deadline=7.0, output_tokens=20, is_begun=True),
        waiter(deadline=7.0, output_tokens=2),
    )
    for made in (late, begun, other):
        queue.enter(made)
    clock.now = 4.0
    p.report(WorkerLoad())
    queue.reported()
    await asyncio.sleep(0)
    assert isinstance(refused.error, ResourceExhausted) and goes.went is not None and goes_too.went is not None
    assert late.timer is None


async def test_who_comes_when_a_batch_has_a_place_again_is_not_held_to_how_long_others_waited_for_one() -> None:
    clock = Clock()
    p, d = worker("p", "prefill", queued_tokens=100), worker("d", "decode", max_running=1, running=1, waiting=1)
    queue = queue_of(Workers(p, d), clock=clock)
    queue.answered(Answer(tokens=2, handoff_seconds=0.0, place_seconds=10.0, rest_seconds=0.0))
    (late, refused), (second, goes) = (waiter(deadline=4.0, output_tokens=2) for _ in range(2))
    queue.enter(late)
    p.report(WorkerLoad())
    queue.reported()
    await asyncio.sleep(0)
    assert refused.error is not None, "one runs and one waits there"

    p.report(WorkerLoad(queued_tokens=100))
    queue.enter(second)
    d.report(WorkerLoad())
    queue.freed(0)
    d.report(WorkerLoad(running=1))
    p.report(WorkerLoad())
    queue.reported()
    await asyncio.sleep(0)
    assert goes.went is not None


async def test_answers_are_not_expected_to_take_as_long_as_under_a_load_that_is_over() -> None:
    p, d = worker("p", "prefill"), worker("d", "decode", running=1)
    queue = queue_of(Workers(p, d))
    queue.answered(Answer(tokens=102, handoff_seconds=0.0, place_seconds=0.1, rest_seconds=30.0))
    fates = []
    for load in (WorkerLoad(running=1), WorkerLoad()):
        p.report(WorkerLoad())
        d.report(load)
        queue.enter(waiter()[0])
        p.report(WorkerLoad(queued_tokens=100))
        made, fate = waiter(deadline=20.0, output_tokens=100)
        queue.enter(made)
        p.report(WorkerLoad())
        queue.reported()
        await asyncio.sleep(0)
        fates.append(fate.error is None)
    assert fates == [False, True], "the second time nothing was left of the load"


async def test_a_retry_gets_in_line_after_its_delay_unless_it_has_left() -> None:
    queue = queue_of(Workers(worker("p", "prefill"), worker("d", "decode")))
    (made, fate), (other, gone) = waiter(), waiter()
    queue.enter_later(made, delay_seconds=0.01)
    queue.enter_later(other, delay_seconds=0.01)
    queue.leave(other)
    assert fate.went is None
    await eventually(lambda: fate.went is not None, within=1)
    assert gone.went is None and len(queue) == 0


async def test_time_without_a_pair_and_what_a_fault_held_up_are_not_the_line_s_pace() -> None:
    clock = Clock()
    p, d = worker("p", "prefill", queued_tokens=1000), worker("d", "decode")
    workers = Workers(p, d)
    queue = queue_of(workers, clock=clock)
    waits, _ = waiter(1000)
    queue.enter(waits)
    clock.now = 3.0
    for _ in range(8):
        queue.freed(375)  # 1000 a second.
    d.has_session = False
    queue.changed()
    clock.now = 60.0
    d.has_session = True
    queue.changed()
    made, fate = waiter(10, deadline=70.0)
    queue.enter(made)
    assert fate.error is None and queue.retry_after() < timedelta(seconds=5)

    clock.now = 66.0  # A transfer stalls.
    queue.freed(0)
    late, refused = waiter(10, deadline=69.0)
    queue.enter(late)
    assert refused.error is not None, "nothing says yet that it is no load"
    queue.held_up()
    again, kept = waiter(10, deadline=69.0)
    queue.enter(again)
    assert kept.error is None
    for each in (waits, made, again):
        queue.leave(each)


@pytest.mark.parametrize(("lull", "is_idle", "is_refused"), [(0.5, False, True), (2.0, False, False), (0.1, True, False)])
async def test_a_new_line_is_not_held_to_the_pace_of_one_that_is_gone_for_long_or_with_all_work(
    lull: float, is_idle: bool, is_refused: bool
) -> None:
    clock = Clock()
    p = worker("p", "prefill")
    p.report(WorkerLoad(waiting=19, queued_tokens=1000))
    queue = queue_of(Workers(p, worker("d", "decode")), clock=clock)
    slow, _ = waiter(1000)
    queue.enter(slow)
    clock.now = 40.0
    for _ in range(4):
        queue.freed(1)  # Something else than prompts held them up: pages, say, of others' long answers.
    queue.leave(slow)
    await asyncio.sleep(0)
    clock.now += lull
    if is_idle:
        p.report(WorkerLoad())
        queue.enter(waiter(1000)[0])
        p.report(WorkerLoad(waiting=19, queued_tokens=1000))
    made, fate = waiter(1, deadline=clock.now + 30.0)
    queue.enter(made)
    assert (fate.error is not None) is is_refused
    queue.leave(made)


async def test_what_workers_give_back_may_try_again_for_as_long_as_others_wait() -> None:
    clock = Clock()
    queue = queue_of(Workers(worker("p", "prefill"), worker("d", "decode")), clock=clock, longest_wait=5)
    clock.now = 14.9
    assert queue.why_not_again(10.0) is None
    clock.now = 15.0
    assert "waited 5 s for a worker with room" in str(queue.why_not_again(10.0))
