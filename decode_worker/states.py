"""The states of a request on a decode worker, one table of moves and one door.

RESERVED and RECEIVING belong to a ticket, which stands for all n completions of a prompt; COMMITTED and RUNNING to each
completion.
"""

from __future__ import annotations

from enum import Enum

from common import states


class State(Enum):
    """RESERVED: in line for pages. RECEIVING: has them, KV is on its way, the lease runs. COMMITTED: all KV is here, waits for a
    place in the batch. RUNNING: in the batch. LEAVING: ended for its router, but a step that was launched before still has it, so
    its pages and its row wait. DONE: ended, one way or the other."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RUNNING = "running"
    LEAVING = "leaving"
    DONE = "done"


MOVES: dict[State, frozenset[State]] = {
    State.RESERVED: frozenset({State.RECEIVING, State.DONE}),
    State.RECEIVING: frozenset({State.COMMITTED, State.DONE}),
    State.COMMITTED: frozenset({State.RUNNING, State.DONE}),
    State.RUNNING: frozenset({State.LEAVING, State.DONE}),
    State.LEAVING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}


class Stateful(states.Stateful[State]):
    """A ticket or a completion."""

    def __init__(self, state: State) -> None:
        super().__init__(state, MOVES)
