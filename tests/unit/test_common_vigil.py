"""Silence, and what is not one."""

import pytest

from common.vigil import Vigil

pytestmark = pytest.mark.unit


def looks(vigil: Vigil, *moments: float) -> list[float]:
    return [round(vigil.look(moment), 3) for moment in moments]


def test_silence_adds_up_over_looks() -> None:
    vigil = Vigil(tick_seconds=0.5, now=10.0)
    assert looks(vigil, 10.5, 11.0, 11.5) == [0.5, 1.0, 1.5]


def test_a_listener_that_was_stopped_blames_nobody_for_it() -> None:
    vigil = Vigil(tick_seconds=0.5, now=10.0)
    assert looks(vigil, 70.0) == [0.75]


def test_a_listener_that_is_always_a_little_late_still_comes_to_the_end_of_its_patience() -> None:
    vigil = Vigil(tick_seconds=0.5, now=0.0)
    assert looks(vigil, *[float(second) for second in range(1, 5)])[-1] == 3.0
