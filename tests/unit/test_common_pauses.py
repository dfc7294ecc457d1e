"""Whether this process stood still a moment ago."""

from __future__ import annotations

import asyncio

import pytest

from common.pauses import FRESH_SECONDS, LONG_SECONDS, TICK_SECONDS, Pauses
from tests.helpers.eventually import eventually, stand_still

pytestmark = pytest.mark.unit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_look_that_comes_late_is_the_end_of_a_pause_and_one_in_time_is_none() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    assert not pauses.just_ended()
    clock.now += TICK_SECONDS
    assert not pauses.just_ended()
    clock.now += TICK_SECONDS + LONG_SECONDS + 0.01
    assert pauses.just_ended(), "asked before any tick"
    clock.now += 0.9 * FRESH_SECONDS
    assert pauses.just_ended()
    clock.now += 0.2 * FRESH_SECONDS
    assert not pauses.just_ended()


async def test_ticks_see_a_loop_that_stood_still_and_end_with_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.pauses.FRESH_SECONDS", 60.0)
    pauses = Pauses()
    pauses.begin()
    stand_still(TICK_SECONDS + LONG_SECONDS + 0.05)
    await asyncio.sleep(0.05)  # The tick is first; what is asked after it hears of the pause too.
    await eventually(pauses.just_ended, within=5)
    pauses.close()
    pauses.close()
