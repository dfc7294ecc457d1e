"""States move along the table and nowhere else; recent facts are forgotten in time."""

from __future__ import annotations

import pytest

from decode_worker.recent import Recent
from decode_worker.states import MOVES, State, Stateful


@pytest.mark.parametrize("start", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_moves_of_the_table_are_possible(start: State, target: State) -> None:
    thing = Stateful(start)
    if target in MOVES[start]:
        thing.move_to(target)
        assert thing.state is target
    else:
        with pytest.raises(AssertionError, match=f"no move from {start.name} to {target.name}"):
            thing.move_to(target)


def test_every_state_can_end() -> None:
    assert all(State.DONE in moves for state, moves in MOVES.items() if state is not State.DONE)


def test_a_fact_is_kept_for_its_time_counted_from_the_last_put() -> None:
    recent: Recent[str, int] = Recent(10.0)
    recent.put("a", 1, now=0.0)
    recent.put("b", 2, now=4.0)
    recent.put("a", 3, now=5.0)
    recent.forget_old(14.0)
    assert ("b" in recent, recent.get("a")) == (False, 3)
    recent.forget_old(15.0)
    assert len(recent) == 0


def test_memory_is_bounded_and_the_oldest_fact_goes_first() -> None:
    recent: Recent[int, None] = Recent(10.0, max_size=3)
    for i in range(5):
        recent.put(i, None, now=float(i))
    assert [i for i in range(5) if i in recent] == [2, 3, 4]
