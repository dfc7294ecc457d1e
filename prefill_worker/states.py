"""The states of a request on a prefill worker, one table of moves and one door."""

from __future__ import annotations

from enum import Enum

from common import states


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


class Stateful(states.Stateful[State]):
    """A request, as the engine or as the event loop sees it."""

    def __init__(self) -> None:
        super().__init__(State.QUEUED, MOVES)
