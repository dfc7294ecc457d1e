"""The states of a request on a prefill worker, one table of moves and one door."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """QUEUED: waits for pages here. RESERVING: has them, waits for the decode worker's. COMPUTING: chunks run, pages move.
    COMMITTING: the first tokens are out, the decode worker is taking over. DONE: ended, one way or the other."""

    QUEUED = "queued"
    RESERVING = "reserving"
    COMPUTING = "computing"
    COMMITTING = "committing"
    DONE = "done"


MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RESERVING, State.DONE}),
    State.RESERVING: frozenset({State.COMPUTING, State.DONE}),
    State.COMPUTING: frozenset({State.COMMITTING, State.DONE}),
    State.COMMITTING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}


class Stateful:
    """Something that is in one State at a time and changes it through move_to alone."""

    def __init__(self) -> None:
        self._state = State.QUEUED

    @property
    def state(self) -> State:
        return self._state

    def move_to(self, state: State) -> None:
        """Raises AssertionError on a move the table does not have."""
        assert state in MOVES[self._state], f"no move from {self._state.name} to {state.name}"
        self._state = state
