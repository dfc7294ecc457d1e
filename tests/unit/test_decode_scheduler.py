"""The plan for a step, as a function of values."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import Retract, Step, plan


@dataclass(frozen=True)
class One:
    uid: int
    needs_page: bool = False

    @property
    def precedence(self) -> tuple[int, int, int]:
        return (0, self.uid, 0)


def test_everybody_with_room_steps_in_order() -> None:
    assert plan([One(1), One(3)], [One(2)], places=6, available=0) == Step([One(1), One(2), One(3)], [], [])


def test_committed_requests_join_only_while_the_batch_has_places() -> None:
    step = plan([One(1), One(2)], [One(3), One(4)], places=1, available=0)
    assert step == Step([One(1), One(2), One(3)], [], [])


def test_pages_go_to_the_oldest_first_and_the_youngest_of_all_gives_way() -> None:
    running = [One(1, needs_page=True), One(2, needs_page=True)]
    assert plan(running, [One(3)], places=0, available=1) == Retract(One(3))
    assert plan(running, [], places=0, available=1) == Retract(One(2, needs_page=True))
    assert plan(running[:1], [], places=1, available=1) == Step(running[:1], running[:1], [])


def test_the_oldest_is_never_retracted_but_waits() -> None:
    alone = One(1, needs_page=True)
    assert plan([alone], [], places=1, available=0) == Step([], [], [alone])


@given(
    st.lists(st.builds(One, st.integers(0, 50), st.booleans()), unique_by=lambda one: one.uid, max_size=12),
    st.integers(0, 12),
    st.integers(1, 8),
    st.integers(0, 6),
)
def test_retracting_until_a_plan_comes_always_ends_with_the_oldest_served_first(
    everybody: list[One], running: int, max_running: int, available: int
) -> None:
    everybody = sorted(everybody, key=lambda one: one.precedence)
    running = min(running, max_running, len(everybody))
    batch, committed = everybody[:running], everybody[running:]
    while isinstance(step := plan(batch, committed, places=max_running - len(batch), available=available), Retract):
        assert step.victim == max([*batch, *committed], key=lambda one: one.precedence)
        assert len(batch) + len(committed) > 1
        batch, committed = ([one for one in side if one != step.victim] for side in (batch, committed))
        available += 1
    assert len(step.grow) <= available
    assert len(step.batch) <= max_running
    assert step.batch == sorted(step.batch, key=lambda one: one.precedence)
    assert not step.starved or (len(batch) + len(committed) == 1 and not step.batch)
