"""Names and bounds of running requests."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from common.errors import AlreadyExists, PdserveError, ResourceExhausted, Unavailable
from router.admission import Admission

pytestmark = pytest.mark.unit


class Nobody:
    """A line in which nobody waits."""

    def would_displace(self, priority: int, tenant: str) -> bool:
        return False

    def displace(self, priority: int, tenant: str, error: PdserveError) -> bool:
        return False

    def retry_after(self) -> timedelta:
        return timedelta(seconds=7)


class OneBetter(Nobody):
    """Somebody waits who has less of a right than everybody of a priority above 0."""

    def __init__(self) -> None:
        self.refused: list[PdserveError] = []

    def would_displace(self, priority: int, tenant: str) -> bool:
        return priority > 0

    def displace(self, priority: int, tenant: str, error: PdserveError) -> bool:
        if priority > 0:
            self.refused.append(error)
        return priority > 0


def test_a_name_is_taken_until_its_owner_leaves() -> None:
    admission = Admission(line=Nobody(), max_queue=9, max_in_flight=9)
    with admission.enter("a"), pytest.raises(AlreadyExists, match="'a'"):
        admission.enter("a")
    with admission.enter("a"):
        assert admission.in_flight == 1
    assert (admission.in_flight, admission.queued) == (0, 0)


def test_clients_choose_names_without_knowing_of_each_other() -> None:
    admission = Admission(line=Nobody(), max_queue=9, max_in_flight=9)
    with admission.enter("a", client="x") as mine, admission.enter("a", client="y") as other:
        assert (admission.find("a", client="x"), admission.find("a", client="y")) == (mine, other)
        assert admission.find("a") is None and admission.in_flight == 2
        with pytest.raises(AlreadyExists, match="'a'"):
            admission.enter("a", client="x")
    assert admission.in_flight == 0


def test_the_queue_is_bounded_and_a_first_token_makes_room() -> None:
    admission = Admission(line=Nobody(), max_queue=2, max_in_flight=3)
    stays = [admission.enter(name) for name in "ab"]
    with pytest.raises(ResourceExhausted, match=r"2 requests wait.*limit is 2 \(--max-queue\); try again in 7 s") as full:
        admission.enter("c")
    assert full.value.retry_after == timedelta(seconds=7)
    stays[0].started()
    stays[0].started()
    assert (admission.queued, admission.streaming) == (1, 1)
    third = admission.enter("c")
    third.started()
    with pytest.raises(ResourceExhausted, match=r"3 requests are in flight.*limit is 3 \(--max-in-flight\)"):
        admission.enter("d")


def test_a_newcomer_with_more_of_a_right_takes_a_place_in_the_full_queue_but_not_beyond_what_may_be_in_flight() -> None:
    line = OneBetter()
    admission = Admission(line=line, max_queue=1, max_in_flight=2)
    admission.enter("a")
    with pytest.raises(ResourceExhausted, match="--max-queue"):
        admission.enter("b", priority=0)
    admission.enter("b", priority=1)
    assert ["--max-queue" in str(error) for error in line.refused] == [True]
    with pytest.raises(ResourceExhausted, match="--max-in-flight"):
        admission.enter("c", priority=1)


def test_a_refused_request_leaves_no_trace() -> None:
    admission = Admission(line=Nobody(), max_queue=1, max_in_flight=1)
    with admission.enter("a"), pytest.raises(ResourceExhausted):
        admission.enter("b")
    assert admission.find("b") is None and admission.in_flight == 0


def test_closed_means_nobody_gets_in() -> None:
    admission = Admission(line=Nobody(), max_queue=1, max_in_flight=1)
    admission.close("the router is shutting down")
    with pytest.raises(Unavailable, match="shutting down"):
        admission.enter("a")


def test_an_end_asked_for_before_there_was_anything_to_end_is_not_forgotten() -> None:
    stay = Admission(line=Nobody(), max_queue=1, max_in_flight=1).enter("a")
    ends: list[PdserveError | None] = []
    stay.end(None)
    stay.attach(ends.append)
    stay.end(Unavailable("x"))
    assert ends[0] is None and str(ends[1]) == "x"


async def test_what_is_prepared_is_given_up_as_soon_as_its_request_is_ended() -> None:
    admission = Admission(line=Nobody(), max_queue=5, max_in_flight=5)

    async def preparing(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "made"

    assert await admission.enter("a").unless_ended(preparing(0)) == "made"
    for name, error in (("b", None), ("c", Unavailable("the grace is over"))):
        stay = admission.enter(name)
        waiting = asyncio.create_task(stay.unless_ended(preparing(60)))
        await asyncio.sleep(0)
        stay.end(error)
        stay.end(None)
        await asyncio.sleep(0)
        stay.end(None)  # While the first is being carried out.
        if error is None:
            assert await asyncio.wait_for(waiting, 5) is None
        else:
            with pytest.raises(Unavailable, match="the grace is over"):
                await asyncio.wait_for(waiting, 5)


async def test_a_timeout_of_what_is_prepared_is_no_end_of_its_request() -> None:
    async def timing_out() -> None:
        raise TimeoutError("its own")

    stay = Admission(line=Nobody(), max_queue=5, max_in_flight=5).enter("a")
    with pytest.raises(TimeoutError, match="its own"):
        await stay.unless_ended(timing_out())


async def test_empty_returns_when_the_last_one_left() -> None:
    admission = Admission(line=Nobody(), max_queue=5, max_in_flight=5)
    await asyncio.wait_for(admission.empty(), 0.1)
    with admission.enter("a"):
        waiting = asyncio.create_task(admission.empty())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 0.1)


async def test_a_name_is_waited_for_until_its_holder_leaves_and_no_longer_than_said_can_10() -> None:
    admission = Admission(line=Nobody(), max_queue=4, max_in_flight=4)
    await admission.left("a", within_seconds=60)
    holder = admission.enter("a")
    await admission.left("a", within_seconds=0.01)
    assert admission.find("a") is holder
    asyncio.get_running_loop().call_later(0.01, holder.__exit__, None, None, None)
    await admission.left("a", within_seconds=60)
    with admission.enter("a"):
        pass


def test_want_of_room_is_told_without_a_name_and_moves_nobody() -> None:
    line = OneBetter()
    admission = Admission(line=line, max_queue=1, max_in_flight=2)
    admission.check_room(priority=0, tenant="")
    with admission.enter("a"):
        with pytest.raises(ResourceExhausted, match="--max-queue"):
            admission.check_room(priority=0, tenant="")
        admission.check_room(priority=1, tenant="")
        assert line.refused == [] and admission.in_flight == 1
        with admission.enter("b", priority=1), pytest.raises(ResourceExhausted, match="--max-in-flight"):
            admission.check_room(priority=1, tenant="")
        admission.close("bye")
        admission.check_room(priority=0, tenant="")  # What is wrong with a request is said first (LIF-01).
        with pytest.raises(Unavailable, match="bye"), admission.enter("c"):
            pass
