"""States: an enum, one table of moves, and one door."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class Stateful(Generic[S]):
    """Something that is in one state at a time and changes it through move_to alone."""

    def __init__(self, state: S, moves: Mapping[S, frozenset[S]]) -> None:
        self._state = state
        self._moves = moves

    @property
    def state(self) -> S:
        return self._state

    def move_to(self, state: S) -> None:
        """Raises AssertionError on a move the table does not have."""
        assert state in self._moves[self._state], f"no move from {self._state.name} to {state.name}"
        self._state = state
