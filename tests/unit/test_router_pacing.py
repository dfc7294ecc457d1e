"""When a stream's writer writes."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.pacing import (
    CALL_SECONDS,
    LONGEST_STRETCH,
    LONGEST_STRETCHED_GAP,
    ROUNDS,
    TARGET,
    WRITE_SECONDS,
    Outlet,
    Rounds,
    Stretch,
    write_gap,
)

pytestmark = pytest.mark.unit


def test_the_gap_grows_with_the_streams_so_that_all_writes_take_at_most_one_core() -> None:
    for streams in (1, 16, 128, 4096):
        assert streams / write_gap(streams) * WRITE_SECONDS == pytest.approx(1.0)
    assert write_gap(0) == 0


def test_a_loop_that_has_time_left_stretches_nothing() -> None:
    stretch = Stretch()
    for demand in (0.0, 0.3, TARGET, 0.5):
        stretch.observe(demand, gap=0.01)
        assert stretch.factor == 1.0


def test_gaps_are_stretched_until_the_demand_is_met_and_no_longer_than_needed() -> None:
    def demand() -> float:
        """Writes that would take twice the loop's time, if gaps were not longer; and what takes a fifth of it anyhow."""
        return min(1.0, 0.2 + 2.0 / stretch.factor)

    stretch = Stretch()
    for _ in range(30):
        stretch.observe(demand(), gap=0.01)
    assert demand() == pytest.approx(TARGET, rel=0.05)
    for _ in range(10):
        stretch.observe(0.4, gap=0.01)
    assert stretch.factor == 1.0


def test_the_stretch_is_bounded_by_itself_and_by_the_gap_that_it_makes() -> None:
    stretch = Stretch()
    for _ in range(100):
        stretch.observe(1.0, gap=0.001)
    assert stretch.factor == LONGEST_STRETCH
    stretch.observe(1.0, gap=LONGEST_STRETCHED_GAP / 3)
    assert stretch.factor == pytest.approx(3), "not wound up beyond what it may do"
    stretch.observe(1.0, gap=1.0)
    assert stretch.factor == 1.0
    rounds = {streams: Rounds(active_streams=lambda streams=streams: streams) for streams in (16, 1024, 100_000)}  # type: ignore[misc]
    for each in rounds.values():
        each.stretch.factor = LONGEST_STRETCH
    assert rounds[16].gap == LONGEST_STRETCH * write_gap(16)
    assert rounds[1024].gap == LONGEST_STRETCHED_GAP
    assert rounds[100_000].gap == write_gap(100_000)


async def test_a_loop_with_more_to_do_than_it_can_writes_less_often() -> None:
    rounds = Rounds(active_streams=lambda: 100)
    outlet = Outlet(rounds)
    outlet.wrote()
    deadline = time.monotonic() + 5
    while rounds.gap == write_gap(100):
        assert time.monotonic() < deadline, "a loop that is never idle was not noticed"
        outlet.touch(time.monotonic())
        spin_until = time.monotonic() + 0.02
        while time.monotonic() < spin_until:
            pass
        await asyncio.wait_for(outlet.wait(), 1)
        outlet.wrote()
    assert rounds.gap > write_gap(100)


async def test_a_flood_of_calls_is_no_reason_to_write_less_often() -> None:
    rounds = Rounds(active_streams=lambda: 100)
    outlet = Outlet(rounds)
    outlet.wrote()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        outlet.touch(time.monotonic())
        spin_until = time.monotonic() + 0.02
        while time.monotonic() < spin_until:
            pass
        for _ in range(int(0.02 / CALL_SECONDS)):
            rounds.call_came()
        await asyncio.wait_for(outlet.wait(), 1)
        outlet.wrote()
        assert rounds.stretch.factor == 1.0


async def test_a_stretch_is_gone_after_a_pause() -> None:
    rounds = Rounds(active_streams=lambda: 500)
    rounds.stretch.factor = 6.0
    outlet = Outlet(rounds)
    await asyncio.sleep(0.05)
    outlet.wrote()
    outlet.touch(time.monotonic())
    assert rounds.stretch.factor == 1.0
    await asyncio.wait_for(outlet.wait(), 5)


async def test_the_first_token_goes_out_at_once_and_the_next_waits_for_the_gap() -> None:
    outlet = Outlet(Rounds(active_streams=lambda: 500))
    outlet.touch(time.monotonic())
    await asyncio.wait_for(outlet.wait(), 1)
    began = time.monotonic()
    outlet.wrote()

    outlet.touch(began)
    outlet.touch(began)
    await outlet.wait()

    assert time.monotonic() - began >= write_gap(500) * (1 - 1 / ROUNDS)


async def test_what_must_not_wait_does_not_and_wakes_only_once() -> None:
    outlet = Outlet(Rounds(active_streams=lambda: 100_000))
    outlet.wrote()
    outlet.touch(time.monotonic())
    outlet.touch_now()
    await asyncio.wait_for(outlet.wait(), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outlet.wait(), 0.02)


async def test_a_touch_while_nobody_waits_is_not_lost() -> None:
    outlet = Outlet(Rounds(active_streams=lambda: 0))
    outlet.touch_now()
    await asyncio.sleep(0)
    await asyncio.wait_for(outlet.wait(), 1)


async def test_closing_forgets_the_timer() -> None:
    outlet = Outlet(Rounds(active_streams=lambda: 100))
    outlet.wrote()
    outlet.touch(time.monotonic())
    outlet.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outlet.wait(), 0.03)


async def test_streams_whose_gap_is_over_write_together_and_after_a_pause_at_once() -> None:
    rounds = Rounds(active_streams=lambda: 10_000)  # 0.8 s between writes, 0.2 between rounds.
    outlets = [Outlet(rounds) for _ in range(3)]
    for outlet in outlets:
        outlet.may_write_at = time.monotonic() - 1
    first, second, third = (asyncio.ensure_future(outlet.wait()) for outlet in outlets)
    outlets[0].touch(time.monotonic())
    outlets[1].touch(time.monotonic())
    await asyncio.wait_for(first, 1)
    began = time.monotonic()
    assert second.done(), "both in one round"
    outlets[2].touch(began)
    await third
    assert time.monotonic() - began > write_gap(10_000) / ROUNDS / 2


async def test_a_stream_does_not_write_in_a_round_before_its_gap_is_over() -> None:
    rounds = Rounds(active_streams=lambda: 5_000)
    early, late = Outlet(rounds), Outlet(rounds)
    early.may_write_at = time.monotonic() - 1
    began = time.monotonic()
    late.wrote()
    waits = [asyncio.ensure_future(outlet.wait()) for outlet in (early, late)]
    early.touch(began)
    late.touch(began)
    await waits[0]
    assert not waits[1].done()
    await waits[1]
    assert time.monotonic() - began >= write_gap(5_000) * (1 - 1 / ROUNDS)
