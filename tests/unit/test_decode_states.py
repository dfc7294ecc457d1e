"""States move along the table and nowhere else."""

from __future__ import annotations

import pytest

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
