"""Working, draining, leaving: who asks, and what the worker and its health do."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from common.errors import Unavailable
from common.rpc.duty import Duty, State
from common.rpc.process import Stop
from tests.helpers.eventually import eventually

pytestmark = pytest.mark.unit

SHORT, LONG = timedelta(milliseconds=50), timedelta(seconds=60)


class Worker:
    """Drains until told that it is empty, or for the grace."""

    def __init__(self) -> None:
        self.is_draining = False
        self.graces: list[timedelta] = []
        self.empty = asyncio.Event()
        self.died: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def drain(self, grace: timedelta) -> None:
        self.is_draining = True
        self.graces.append(grace)
        try:
            async with asyncio.timeout(grace.total_seconds()):
                await self.empty.wait()
        except TimeoutError:
            pass

    def undrain(self) -> None:
        self.is_draining = False


class Stand:
    def __init__(self, grace: timedelta = LONG) -> None:
        self.worker, self.stop = Worker(), Stop()
        self.serving: list[bool] = []
        self.reported: list[bool] = []
        self.duty = Duty(self.worker, grace=grace, set_serving=self.serving.append)
        self.duty.on_change = lambda: self.reported.append(self.worker.is_draining)
        self.registering: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        self.duty.begin()
        self.over = asyncio.create_task(self.duty.over(self.stop, registering=self.registering))


async def test_a_signal_drains_within_the_worker_s_own_grace_and_tells_health_and_routers_first() -> None:
    stand = Stand()
    await asyncio.sleep(0.02)
    assert not stand.over.done(), "a worker without routers works on"
    stand.stop.requested.set()
    await eventually(lambda: stand.reported == [True], within=1)
    assert (stand.serving, stand.worker.graces, stand.duty.state) == ([True, False], [LONG], State.LEAVING)
    assert not stand.over.done()
    stand.worker.empty.set()
    await asyncio.wait_for(stand.over, 1)


async def test_a_drained_worker_that_stays_takes_work_again() -> None:
    stand = Stand()
    stand.duty.drain(SHORT, True)
    await eventually(lambda: stand.reported == [True], within=1)
    assert stand.worker.graces == [SHORT]
    stand.duty.undrain()
    assert (stand.serving, stand.reported, stand.worker.is_draining) == ([True, False, True], [True, False], False)
    await asyncio.sleep(0.1)
    assert not stand.over.done() and stand.duty.state is State.WORKING
    stand.over.cancel()


async def test_whoever_drains_again_may_give_it_another_grace() -> None:
    stand = Stand()
    stand.duty.drain(LONG, True)
    await eventually(lambda: stand.worker.graces == [LONG], within=1)
    stand.duty.drain(None, True)
    stand.duty.drain(SHORT, True)
    await eventually(lambda: stand.worker.graces == [LONG, SHORT], within=1)
    stand.over.cancel()


async def test_a_drained_worker_goes_when_it_is_told_to_and_then_does_not_turn_back() -> None:
    stand = Stand()
    stand.duty.drain(None, True)
    await eventually(lambda: stand.worker.graces == [LONG], within=1)
    stand.duty.drain(SHORT, False)
    await eventually(lambda: stand.worker.graces == [LONG, SHORT], within=1)
    stand.duty.undrain()
    assert stand.worker.is_draining
    await asyncio.wait_for(stand.over, 1)


async def test_a_death_is_not_waited_out() -> None:
    stand = Stand()
    stand.stop.requested.set()
    await eventually(lambda: stand.worker.is_draining, within=1)
    stand.worker.died.set_result(RuntimeError("lost"))
    await asyncio.wait_for(stand.over, 1)


async def test_what_breaks_the_registration_is_not_hidden() -> None:
    stand = Stand()
    stand.over.cancel()

    async def breaks() -> None:
        raise Unavailable("no load")

    with pytest.raises(Unavailable, match="no load"):
        await asyncio.wait_for(stand.duty.over(stand.stop, registering=asyncio.create_task(breaks())), 1)
