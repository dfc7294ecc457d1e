"""States, the waiting line and errands of a prefill worker."""

from __future__ import annotations

import asyncio

import pytest

from prefill_worker.errands import Errands
from prefill_worker.job import Job
from prefill_worker.states import MOVES, State, Stateful
from prefill_worker.waiting import Waiting
from tests.helpers.prefill_core import make_req

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE])
def test_every_state_but_done_may_end(state: State) -> None:
    assert State.DONE in MOVES[state]


def test_a_move_the_table_does_not_have_is_a_mistake_in_the_program() -> None:
    thing = Stateful()
    with pytest.raises(AssertionError, match="QUEUED to COMPUTING"):
        thing.move_to(State.COMPUTING)
    thing.move_to(State.DONE)
    with pytest.raises(AssertionError, match="DONE to QUEUED"):
        thing.move_to(State.QUEUED)


def test_waiting_jobs_leave_in_order_and_from_the_middle() -> None:
    waiting = Waiting()
    jobs = [Job(make_req([1], uid=uid, attempt=attempt), arrival=0, call_id=None) for uid, attempt in ((3, 1), (1, 2), (1, 1))]
    for job in jobs:
        waiting.add(job)
    assert waiting.first() is jobs[2]
    waiting.remove(jobs[1])
    waiting.remove(jobs[2])
    assert waiting.first() is jobs[0] and len(waiting) == 1


async def test_an_errand_outlives_its_caller_and_its_result_is_not_lost() -> None:
    errands, unread, go = Errands(), list[int](), asyncio.Event()

    async def errand() -> int:
        await go.wait()
        return 7

    caller = asyncio.create_task(errands.run(errand(), if_unread=unread.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert unread == [] and len(errands) == 1
    go.set()
    await asyncio.sleep(0.01)
    assert unread == [7] and len(errands) == 0


async def test_an_errand_whose_caller_waits_gives_it_the_result_or_the_error() -> None:
    errands, unread = Errands(), list[int]()

    async def seven() -> int:
        return 7

    async def fails() -> int:
        raise ValueError("no")

    assert await errands.run(seven(), if_unread=unread.append) == 7
    with pytest.raises(ValueError, match="no"):
        await errands.run(fails(), if_unread=unread.append)
    assert unread == []


async def test_closing_errands_ends_them() -> None:
    errands = Errands()
    caller = asyncio.create_task(errands.run(asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    await errands.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(errands) == 0
