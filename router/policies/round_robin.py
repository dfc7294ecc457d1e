"""round_robin: workers in turn, each side by itself, in order of id.

The state names who was last rather than counting, so that the turn goes on where it was when workers come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.placement import Ask, Pair, Seats
from router.workers import Worker


class Turn(NamedTuple):
    """Ids of the workers that were last; "" before the first."""

    prefill: str = ""
    decode: str = ""


def round_robin(seats: Seats, ask: Ask, state: Turn) -> tuple[Pair, Turn]:
    """A policy (router/policies)."""
    first = _next(seats.firsts, state.prefill)
    state = state._replace(prefill=first.id)
    if not ask.needs_decode or first.profile.local_prefill:
        return Pair(first, first if ask.needs_decode else None), state
    decode = _next(seats.decodes, state.decode)
    return Pair(first, decode), state._replace(decode=decode.id)


def _next(workers: Sequence[Worker], last: str) -> Worker:
    return min(workers, key=lambda worker: (worker.id <= last, worker.id))
